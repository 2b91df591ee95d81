// The models that a worker process holds, loaded and warmed up.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"

namespace ditfleet::worker {

// pipeline::encode_media, or what a test puts in its place.
using ImageEncoder = std::function<Result<std::string>(const pipeline::Media&, job::OutputFormat, int quality)>;

// A class that is to be warm before the worker is ready.
struct WarmupClass {
  std::string model;  // empty: each
  int width = 0, height = 0;
  std::optional<int> max_sequence_length;  // nothing: the model's default
  bool true_cfg = false;
};

// Members in the order of their destruction backwards: models go before the engine.
struct ModelSet {
  std::unique_ptr<pipeline::Engine> engine;  // null in tests
  std::string device, device_name, precision;
  job::Catalogue catalogue;  // of the loaded models
  std::map<std::string, std::unique_ptr<pipeline::Model>> models;
  std::vector<WarmupClass> warmup_classes;
};

// Draws the smallest picture that each model takes, one step, then each of warmup_classes, two steps (what is set up on
// second use is set up, too), and encodes them: a model or a class that cannot be drawn is known before the first job.
// Times go to the metrics and the log by part (model_timings.h). Returns the shape classes that are warm from it.
// kInvalidArgument: a class that its model does not take, with what would be right. Blocks; call on the device thread.
Result<std::vector<std::string>> warm_up(const ModelSet& set, const ImageEncoder& encode_image);

}  // namespace ditfleet::worker
