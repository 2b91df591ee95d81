// Converts a job's spec into the pipeline's request. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "shared/job/spec.h"

namespace ditfleet::worker {

// Precondition: `spec` is complete (job/validate.h). Unit i gets the job's seed plus i, which wraps to negative seeds
// as in torch.
pipeline::GenerationRequest request_of(const job::JobSpec& spec, int unit);

// Decodes an image that a client sent as `field`, "image" or "mask", and adds it to the request. kInvalidArgument (with
// the field): not an image, or one that is too large.
Result<void> add_image(pipeline::GenerationRequest& request, const std::string& field, std::string_view file);

// The steps (counted from 1) after which previews are made: at most `count`, ascending, evenly spread over `total`
// steps, and never the last step.
std::vector<int> preview_steps(int total, int count);

}  // namespace ditfleet::worker
