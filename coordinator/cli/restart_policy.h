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

  // It ended after `lived`; `by_itself`: it exited with a failure, as opposed to being killed, so that it
  // will most likely do the same again. Returns how long to wait before the next start.
  Duration ended(Duration lived, bool by_itself) {
    if (lived >= kStable) delay_ = kFirst, refusals_ = 0;
    refusals_ = by_itself && lived < kStable ? refusals_ + 1 : 0;
    const Duration wait = delay_;
    delay_ = std::min(delay_ * 2, kLongest);
    return wait;
  }
  bool hopeless() const { return refusals_ >= kHopeless; }

 private:
  Duration delay_ = kFirst;
  int refusals_ = 0;
};

}  // namespace ditfleet::cli
