// A fixed program of region/backends on the host's GPU.
#pragma once

#include <memory>

#include "pipeline/region/compile/gpu_module.h"
#include "pipeline/region/programs/fixed_program.h"

namespace ditfleet::region {

struct RegionHost;

// Compiled through the kernel cache and loaded, for a host that compiles_for_gpu(); what failed otherwise.
Result<std::shared_ptr<const GpuModule>> load_fixed_module(RegionHost& host, const FixedProgram& program);

// Whether the host's backend is nvrtc.
bool compiles_for_gpu(const RegionHost& host);

// Compiled through the kernel cache and loaded. Null where the host's backend is not nvrtc, and, counted as a fallback,
// where the program cannot be had; with fullgraph the latter throws pipeline::Failure.
std::shared_ptr<const GpuModule> fixed_module(RegionHost& host, const FixedProgram& program);

}  // namespace ditfleet::region
