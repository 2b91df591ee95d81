// Which requests one GPU denoises faster than all: small ones, as a rule.
#pragma once

#include <limits>
#include <map>
#include <mutex>

#include "pipeline/engine.h"

namespace ditfleet::worker {

// Thread-safe.
class Degrees {
 public:
  // Whether one GPU was faster, or the only way that was tried. For a new size: whether that is so for one with at
  // least as many pixels, because the larger a request is, the more it gains from all. The size's number of GPUs is
  // ignored.
  bool one_is_faster(const pipeline::RequestSize& size) const;
  // The time of a step with this size's number of GPUs.
  void observe(const pipeline::RequestSize& size, double step_s);

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  struct Seconds {  // the shortest step
    double with_all = kNever, with_one = kNever;
    bool one_is_faster() const { return with_one < with_all; }
  };

  mutable std::mutex mutex_;
  std::map<pipeline::RequestSize, Seconds> seconds_;  // by size with one GPU
};

}  // namespace ditfleet::worker
