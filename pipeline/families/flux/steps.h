// Denoising, of one generation or of several in common steps.
#pragma once

#include <functional>
#include <vector>

#include "pipeline/families/flux/folder.h"
#include "pipeline/families/flux/generation.h"

namespace ditfleet::pipeline {

// See Model::denoise_batch. `wait` waits for the device, after each step. Runs in a StageScope, while no
// other call with adapters runs on this folder. Throws what ends the whole batch: Failure, and what LibTorch throws.
std::vector<Result<void>> run_steps(const FluxFolder& folder, Placement placement,
                                    const std::vector<FluxGeneration*>& batch, const std::vector<StepCallback>& on_step,
                                    const std::function<void()>& wait);

}  // namespace ditfleet::pipeline
