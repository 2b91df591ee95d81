// When a supervised process that ended is started again, and when that is pointless. Pure: told the times.
#pragma once

#include <algorithm>
#include <chrono>

namespace ditfleet::cli {

class RestartPolicy {
 public:
  using Duration = std::chrono::milliseconds;

  static constexpr Duration kFirst{100}, kLongest{10'000};
  static constexpr Duration kStable{30'000};  // having run this long forgives what was before
  static constexpr int kHopeless = 3;         // quick failures at its own choice in a row

  // Whether one that runs for so long now got further than its earlier tries did: more than twice as far as the longest
  // of them, and a second. One that is never refused works from its start.
  bool works(Duration alive) const { return !hopeless() || got_further(alive); }

  // It ended after `lived`; `by_itself`: it exited with a failure, as opposed to being killed, so that it
  // will most likely do the same again. Returns how long to wait before the next start.
  Duration ended(Duration lived, bool by_itself) {
    // What was killed long after its tries had failed was well again: nothing is won by waiting as they had to.
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
  Duration longest_{0};  // that it lived, of late
  int refusals_ = 0;
};

}  // namespace ditfleet::cli
