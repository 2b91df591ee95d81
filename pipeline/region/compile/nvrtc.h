// Compiles CUDA C++ to a cubin with NVRTC, which is opened at run time: building DiTFleet needs neither a GPU nor a
// toolkit.
#pragma once

#include <memory>

#include "pipeline/region/compile/compiler.h"

namespace ditfleet::region {

// The architectures that regions can be compiled for.
const std::vector<std::string>& gpu_architectures();  // sm_80 sm_86 sm_89 sm_90a sm_100a sm_120a

// Opens libnvrtc.so.13 once per process. Searches the file `given` (compile.nvrtc), DITFLEET_NVRTC, the wheel
// nvidia-cuda-nvrtc next to LibTorch, the linker's path and a CUDA toolkit. kUnavailable: the message lists these
// places and how to install the library. The compiler must be destroyed before main() returns. Thread-safe.
Result<std::shared_ptr<const Compiler>> open_nvrtc(const std::string& given = {});

// Registers, spills and shared memory of each kernel from the log of ptxas -v. Exposed for tests.
void read_ptxas_log(std::string_view log, std::vector<KernelInfo>& kernels);

}  // namespace ditfleet::region
