// So many at once, so many a second after them.
#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>

#include "shared/core/deadline.h"

namespace ditfleet::kernel_cache {

// Thread safe.
class Allowance {
 public:
  Allowance(double at_once, double per_second) : at_once_(at_once), per_second_(per_second), left_(at_once) {}
  bool take(Deadline::Clock::time_point now) {
    const std::lock_guard lock(mutex_);
    left_ = std::min(at_once_, left_ + std::chrono::duration<double>(now - last_).count() * per_second_);
    last_ = now;
    if (left_ < 1) return false;
    left_ -= 1;
    return true;
  }

 private:
  const double at_once_, per_second_;
  std::mutex mutex_;
  double left_;
  Deadline::Clock::time_point last_ = Deadline::Clock::now();
};

}  // namespace ditfleet::kernel_cache
