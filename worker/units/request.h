// From a job's spec to what the pipeline takes. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "shared/job/spec.h"

namespace ditfleet::worker {

// Precondition: a complete spec (job/validate.h). Unit i has seed + i; past 2^63-1 it wraps around to the
// negative seeds, as in torch.
pipeline::GenerationRequest request_of(const job::JobSpec& spec, int unit);

// After which steps (counted from 1) the `count` previews of a run of `total` steps are made: evenly
// spread, ascending, each once, never the last step. Fewer than `count` where there are too few steps.
std::vector<int> preview_steps(int total, int count);

}  // namespace ditfleet::worker
