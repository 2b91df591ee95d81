// Functions of a library that is opened at run time.
#pragma once

#include <dlfcn.h>

namespace ditfleet::region {

// Points `function` at the library's `name`; false where it has none. The type is the caller's to know.
template <class F>
bool bind(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace ditfleet::region
