// Libraries that are opened at run time, and their functions.
#pragma once

#include <dlfcn.h>

namespace ditfleet::region {

// Points `function` at the library's `name`; false where it has none. The type is the caller's to know.
template <class F>
bool bind(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

// A table of functions out of the library of that name, wherever it lies or has been loaded from already.
// `fill(library, table)` binds them and says whether all are there. Null: there is no such library, or it lacks one.
// The table and the library stay for as long as the process: ask once.
template <class Table, class Fill>
const Table* open_library(const char* name, Fill fill) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) return nullptr;
  auto* table = new Table{};
  return fill(library, *table) ? table : nullptr;
}

}  // namespace ditfleet::region
