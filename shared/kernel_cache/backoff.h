// Exponential backoff with jitter.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "shared/core/deadline.h"
#include "shared/core/ids.h"

namespace ditfleet::kernel_cache {

// The first pause is `first`. Each further pause is twice as long, up to `last`. Jitter shortens a pause by up to half.
// Not thread-safe.
class Backoff {
 public:
  Backoff(std::chrono::milliseconds first, std::chrono::milliseconds last) : next_(first), last_(last) {}
  // Blocks for the next pause, but not past the deadline.
  void wait(Deadline until) {
    const auto pause = std::chrono::duration_cast<std::chrono::microseconds>(next_ * (0.5 + 0.5 * random_fraction()));
    std::this_thread::sleep_for(std::min<Deadline::Clock::duration>(pause, until.left()));
    next_ = std::min(next_ * 2, last_);
  }

 private:
  std::chrono::milliseconds next_, last_;
};

}  // namespace ditfleet::kernel_cache
