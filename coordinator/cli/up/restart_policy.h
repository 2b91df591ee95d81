// When to restart a supervised process that ended, and when to give up. A state machine without a clock.
#pragma once

#include <algorithm>
#include <chrono>

namespace ditfleet::cli {

class RestartPolicy {
 public:
  using Duration = std::chrono::milliseconds;

  static constexpr Duration kFirst{100}, kLongest{10'000};
  static constexpr Duration kStable{30'000};  // running this long clears earlier failures
  static constexpr int kHopeless = 3;         // consecutive quick exits with a failure

  // Whether a process that has been running for `alive` is considered working: it is not hopeless(), or it has run for
  // more than twice as long as its longest earlier attempt, plus a second.
  bool works(Duration alive) const { return !hopeless() || got_further(alive); }

  // The process ended after `lived`. `by_itself`: it was not killed but exited with a failure, which is likely to
  // recur. Returns how long to wait before the restart.
  Duration ended(Duration lived, bool by_itself) {
    // A process that was killed after it had recovered is restarted without the delay of its earlier failures.
    const bool was_well = lived >= kStable || (!by_itself && got_further(lived));
    if (was_well) delay_ = kFirst;
    refusals_ = by_itself && lived < kStable ? refusals_ + 1 : 0;
    longest_ = lived >= kStable ? Duration{0} : std::max(longest_, lived);
    const Duration wait = delay_;
    delay_ = std::min(delay_ * 2, kLongest);
    return wait;
  }
  bool hopeless() const { return refusals_ >= kHopeless; }

 private:
  bool got_further(Duration lived) const {
    return lived >= std::min<Duration>(kStable, 2 * longest_ + std::chrono::seconds(1));
  }

  Duration delay_ = kFirst;
  Duration longest_{0};  // the longest of the recent tries
  int refusals_ = 0;
};

}  // namespace ditfleet::cli
