// Compiles C++ to a shared object with the system's compiler. Runs regions without a GPU.
#pragma once

#include <memory>
#include <string>

#include "pipeline/region/compile/compiler.h"

namespace ditfleet::region {

inline constexpr const char* kHostArch = "cpu";

// The compiler is `given` (compile.cxx), else DITFLEET_CXX, else c++ from PATH. Reads its version and the processor's
// features once per process, which blocks for about 50 ms. kUnavailable: no C++ compiler for this processor was found;
// the message says what to install. Thread-safe.
Result<std::shared_ptr<const Compiler>> open_cpu_jit(const std::string& given = {});

}  // namespace ditfleet::region
