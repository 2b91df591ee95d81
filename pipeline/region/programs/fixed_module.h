// A hand-written program, loaded on the host's GPU.
#pragma once

#include <memory>

#include "pipeline/region/compile/gpu_module.h"
#include "pipeline/region/programs/fixed_program.h"

namespace ditfleet::region {

struct RegionHost;

// Compiles through the kernel cache and loads. Precondition: compiles_for_gpu(host).
Result<std::shared_ptr<const GpuModule>> load_fixed_module(const RegionHost& host, const FixedProgram& program);

// Whether the host's backend is nvrtc.
bool compiles_for_gpu(const RegionHost& host);

// As load_fixed_module(), but returns null if the host's backend is not nvrtc or the program is not available. The
// latter counts as a fallback, and with fullgraph it throws pipeline::Failure.
std::shared_ptr<const GpuModule> fixed_module(const RegionHost& host, const FixedProgram& program);

}  // namespace ditfleet::region
