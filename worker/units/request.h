// Makes the pipeline's request from a job's spec. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "shared/job/spec.h"

namespace ditfleet::worker {

// Precondition: a complete spec (job/validate.h). Unit i has the seed plus i, which wraps to negative seeds as in
// torch.
pipeline::GenerationRequest request_of(const job::JobSpec& spec, int unit);

// The steps (from 1) after which previews are made: at most `count`, ascending, evenly spread over `total` steps, and
// never the last step.
std::vector<int> preview_steps(int total, int count);

}  // namespace ditfleet::worker
