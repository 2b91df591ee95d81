// Waits that grow, each between half and all of its time: those who wait must not come back in step.
#pragma once

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "shared/core/deadline.h"

namespace ditfleet::kernel_cache {

// Not thread safe.
class Patience {
 public:
  Patience(std::chrono::milliseconds first, std::chrono::milliseconds last) : next_(first), last_(last) {}
  void wait(Deadline until) {
    thread_local std::minstd_rand engine{std::random_device{}()};
    const auto full = std::chrono::duration_cast<std::chrono::microseconds>(next_).count();
    const std::chrono::microseconds pause(std::uniform_int_distribution<std::int64_t>(full / 2, full)(engine));
    std::this_thread::sleep_for(std::min<Deadline::Clock::duration>(pause, until.left()));
    next_ = std::min(next_ * 2, last_);
  }

 private:
  std::chrono::milliseconds next_, last_;
};

}  // namespace ditfleet::kernel_cache
