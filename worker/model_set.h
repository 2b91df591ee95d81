// The models that a worker process holds, loaded and warmed up.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"

namespace ditfleet::worker {

// pipeline::encode_image, or what a test puts in its place.
using ImageEncoder = std::function<Result<std::string>(const pipeline::Image&, pipeline::ImageFormat, int quality)>;

// Members in the order of their destruction backwards: models go before the engine.
struct ModelSet {
  std::unique_ptr<pipeline::Engine> engine;  // null in tests
  std::string device, device_name, precision;
  job::Catalogue catalogue;                  // of the loaded models
  std::map<std::string, std::unique_ptr<pipeline::Model>> models;
};

// Draws the smallest picture that each model takes, one step, and encodes it: whatever is set up on first
// use is set up, and a model that cannot draw is known before the first job. Returns the shape classes
// that are warm from it. Blocks; call on the device thread.
Result<std::vector<std::string>> warm_up(const ModelSet& set, const ImageEncoder& encode_image);

}  // namespace ditfleet::worker
