#include "worker/ranks/degrees.h"

#include <algorithm>

namespace ditfleet::worker {
namespace {

// The number of steps does not matter to the time of one.
pipeline::RequestSize key_of(pipeline::RequestSize size) {
  size.gpus = 1;
  size.steps = 0;
  return size;
}

}  // namespace

bool Degrees::one_is_faster(const pipeline::RequestSize& size) const {
  const std::lock_guard lock(mutex_);
  const auto known = seconds_.find(key_of(size));
  if (known != seconds_.end()) return known->second.one_is_faster();
  return std::any_of(seconds_.begin(), seconds_.end(), [&](const auto& other) {
    return other.first.pixels() >= size.pixels() && other.second.one_is_faster();
  });
}

void Degrees::observe(const pipeline::RequestSize& size, double step_s) {
  const std::lock_guard lock(mutex_);
  Seconds& seconds = seconds_[key_of(size)];
  double& best = size.gpus == 1 ? seconds.with_one : seconds.with_all;
  best = std::min(best, step_s);
}

}  // namespace ditfleet::worker
