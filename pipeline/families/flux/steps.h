// Denoises one FLUX request.
#pragma once

#include <functional>

#include "pipeline/families/flux/folder.h"
#include "pipeline/families/flux/generation.h"

namespace ditfleet::pipeline {

// Calls `wait`, which waits for the device, after each step. The calling thread must be in a StageScope. Calls with
// adapters on the same folder must not overlap. kCanceled: the callback returned false. Throws Failure and what
// LibTorch throws.
Result<void> run_steps(FluxFolder& folder, Placement placement, FluxGeneration& generation, const StepCallback& on_step,
                       const std::function<void()>& wait);

}  // namespace ditfleet::pipeline
