// Compiles C++ to a shared object with the system's compiler. Runs regions without a GPU.
#pragma once

#include <memory>
#include <string>

#include "pipeline/region/compile/compiler.h"

namespace ditfleet::region {

inline constexpr const char* kHostArch = "cpu";

// The compiler is `given` (compile.cxx), else DITFLEET_CXX, else c++ from PATH; it is asked for its version and the
// processor's features once a process. kUnavailable: there is none, or it is no C++ compiler for this processor; the
// message says what to install. Blocks for some 50 ms the first time. Thread-safe.
Result<std::shared_ptr<const Compiler>> open_cpu_jit(const std::string& given = {});

}  // namespace ditfleet::region
