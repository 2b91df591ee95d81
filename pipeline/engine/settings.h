// A request as a model runs it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/api/model.h"
#include "shared/job/catalogue.h"

namespace ditfleet::pipeline {

struct Settings {
  std::string prompt;
  std::optional<std::string> negative;  // prompt of the second forward of each step; none: one forward
  double cache_threshold = 0;           // of BlockCache; 0: every forward runs all blocks
  job::FieldValues fields;              // of the request, else the model's defaults
  std::int64_t seed = 0;
  int number = 0;  // as GenerationRequest::number
  std::vector<LoraRequest> loras;
  std::vector<std::shared_ptr<const Media>> images;
  std::shared_ptr<const Media> mask;
  std::vector<std::string> warnings;  // about values that were changed or have no effect

  // The value of a field, or `otherwise` if it applies to other models only.
  int integer(job::Field field, int otherwise = 0) const {
    return static_cast<int>(fields.integer(field).value_or(otherwise));
  }
  double real(job::Field field, double otherwise = 0) const { return fields.real(field).value_or(otherwise); }
  int width() const { return integer("width"); }
  int height() const { return integer("height"); }
  int frames() const { return integer("frames", 1); }
  int steps() const { return integer("num_inference_steps"); }  // of the schedule; see strength
  int text_tokens() const { return integer("max_sequence_length"); }
};

// Completes a request with the model's defaults; fields that apply to other models are ignored. A request with an
// image and without a size gets the image's aspect ratio, within the model's default area. Throws Failure
// (kInvalidArgument, with the field) for a value outside the model's limits.
Settings read_settings(const GenerationRequest& request, const job::ModelEntry& model);

}  // namespace ditfleet::pipeline
