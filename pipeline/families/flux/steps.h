// The denoising loop, of one picture or of several together.
#pragma once

#include <functional>
#include <vector>

#include "pipeline/families/flux/folder.h"
#include "pipeline/families/flux/prepared.h"

namespace ditfleet::pipeline {

// See Model::denoise_batch. `wait` waits for what was enqueued, at each step's end. In a StageScope; while no other
// call with adapters runs on this folder. Throws what ends all of them: Failure, and what LibTorch throws.
std::vector<Result<void>> run_steps(const FluxFolder& folder, Placement placement,
                                    const std::vector<FluxPrepared*>& batch, const std::vector<StepCallback>& on_step,
                                    const std::function<void()>& wait);

}  // namespace ditfleet::pipeline
