// CUDA C++ → cubin with NVRTC, which is opened at run time: neither a GPU nor a toolkit is needed to build DiTFleet.
#pragma once

#include <memory>

#include "pipeline/region/compile/compiler.h"

namespace ditfleet::region {

// The architectures that regions are built for.
const std::vector<std::string>& gpu_architectures();  // sm_80 sm_86 sm_89 sm_90a sm_100a sm_120a

// kInvalidArgument, with all that are known, where `arch` is not among them.
Result<void> check_architecture(const std::string& arch, const std::vector<std::string>& known);

// Opens libnvrtc.so.13, once a process: the file `given` (compile.nvrtc); that in DITFLEET_NVRTC; beside LibTorch (the
// wheel nvidia-cuda-nvrtc); where the linker looks; in a CUDA toolkit. kUnavailable says where it looked and what would
// bring one. The compiler must not outlive the process's main(); it is thread safe.
Result<std::shared_ptr<const Compiler>> open_nvrtc(const std::string& given = {});

// Registers, spills and shared memory of each kernel from the log of ptxas -v. Exposed for tests.
void read_ptxas_log(std::string_view log, std::vector<KernelInfo>& kernels);

}  // namespace ditfleet::region
