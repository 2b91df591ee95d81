// Which requests one GPU denoises faster than all: small ones, as a rule.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>

#include "pipeline/engine.h"

namespace ditfleet::worker {

// Thread-safe.
class Degrees {
 public:
  // What the time of a step depends on: width × height × frames, text tokens, and a bit for each scale above 1, which
  // may double the forwards.
  using Class = std::array<std::int64_t, 3>;
  static Class class_of(const pipeline::GenerationRequest& request);

  // Whether one GPU was faster, or the only way that was tried. For a new class: whether that is so for one with at
  // least as many pixels, because the larger a request is, the more it gains from all.
  bool alone(const Class& c) const;
  void observe(const Class& c, bool alone, double step_s);

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static bool is_alone(const std::array<double, 2>& seconds) { return seconds[1] < seconds[0]; }

  mutable std::mutex mutex_;
  std::map<Class, std::array<double, 2>> seconds_;  // shortest step with all ranks, and alone
};

}  // namespace ditfleet::worker
