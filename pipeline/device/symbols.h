// Opens libraries at run time and binds their functions.
#pragma once

#include <dlfcn.h>

namespace ditfleet::pipeline {

// Points `function` at the library's symbol `name`; false if there is none. The caller must know its type.
template <class F>
bool bind(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

// Loads the library of that name, unless it is loaded, and fills a table of functions. `fill(library, table)` binds
// them and returns whether all exist. Null: no such library, or a function is missing. Table and library live as long
// as the process, so call it once.
template <class Table, class Fill>
const Table* open_library(const char* name, Fill fill) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) return nullptr;
  auto* table = new Table{};
  return fill(library, *table) ? table : nullptr;
}

}  // namespace ditfleet::pipeline
