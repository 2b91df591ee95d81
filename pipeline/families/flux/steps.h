// Denoising.
#pragma once

#include <functional>

#include "pipeline/families/flux/folder.h"
#include "pipeline/families/flux/generation.h"

namespace ditfleet::pipeline {

// `wait` waits for the device, after each step. Runs in a StageScope, while no other call with adapters runs on this
// folder. kCanceled: the callback returned false. Throws Failure and what LibTorch throws.
Result<void> run_steps(FluxFolder& folder, Placement placement, FluxGeneration& generation, const StepCallback& on_step,
                       const std::function<void()>& wait);

}  // namespace ditfleet::pipeline
