// What part of the units exceeds of late: their time from ready to end, the last five minutes counting most.
//
// Pure and not thread safe. Times are microseconds of one clock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ditfleet::scheduling {

class LatencyTail {
 public:
  void add(std::int64_t latency_us, std::int64_t now_us);
  // That this part of them exceeds, 2.5 % too much at most; 0 before the first.
  std::int64_t exceeded_by_us(double part) const;

 private:
  // By the logarithm, from a millisecond up: 512 steps of 2.5 % reach five minutes.
  std::array<double, 512> weights_{};
  double total_ = 0;
  std::int64_t since_us_ = 0;  // a unit that ended then has weight 1, a later one more
};

}  // namespace ditfleet::scheduling
