// A hand-written program, loaded on the host's GPU.
#pragma once

#include <memory>

#include "pipeline/region/compile/gpu_module.h"
#include "pipeline/region/programs/fixed_program.h"

namespace ditfleet::region {

struct RegionHost;

// Compiles through the kernel cache and loads. Returns null if the host's backend is not nvrtc or the program is not
// available. The latter counts as a fallback, and with fullgraph it throws pipeline::Failure.
std::shared_ptr<const GpuModule> fixed_module(const RegionHost& host, const FixedProgram& program);

}  // namespace ditfleet::region
