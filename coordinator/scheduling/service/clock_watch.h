// Notices jumps of Redis' clock, by which everything in the queue ends: a host that got the time after its start, a
// restored virtual machine, an operator's mistake. After a jump the leader holds what a wrong clock would end, until an
// operator accepts the clock, the clock is back, or an hour has passed.
//
// No I/O, no clock; not thread-safe. Times are microseconds; those of the caller are of a clock that runs evenly, also
// while the host is suspended (CLOCK_BOOTTIME).
#pragma once

#include <cstdint>

namespace ditfleet::scheduling {

class ClockWatch {
 public:
  static constexpr std::int64_t kPatienceUs = 3'600'000'000;

  explicit ClockWatch(std::int64_t limit_us) : limit_us_(limit_us) {}  // smaller jumps are followed

  // `redis_us`: Redis' time in the reply to a call sent at `sent_us` and received at `received_us`.
  void observe(std::int64_t redis_us, std::int64_t sent_us, std::int64_t received_us);

  enum class Verdict { kKeep, kHold, kRelease };
  // For the leader, after observe(). Both arguments come from Redis, because a jump may also end a leadership.
  // `seen_us`: the latest time of Redis that a leader took for right, 0 if none. `marked`: the shard is marked as held.
  // On kHold the caller marks it and calls on_marked(). A mark that disappears is an operator's consent.
  Verdict judge(std::int64_t seen_us, bool marked);
  void on_marked() { marked_ = true; }
  bool held() const { return held_; }
  std::int64_t jump_us() const { return jump_us_; }  // of the latest observation

 private:
  enum class Cause { kMarked, kMeasured, kBehind };
  void follow();

  const std::int64_t limit_us_;
  std::int64_t low_us_ = 0, high_us_ = 0;  // bounds of Redis' clock minus the caller's, by the latest right observation
  std::int64_t latest_low_us_ = 0, latest_high_us_ = 0, redis_us_ = 0, now_us_ = 0;  // of the latest observation
  std::int64_t jump_us_ = 0;
  bool known_ = false, held_ = false, marked_ = false;
  Cause cause_ = Cause::kMarked;
  std::int64_t since_us_ = 0, behind_us_ = 0;  // when the hold began; with kBehind the time that the clock was behind
};

}  // namespace ditfleet::scheduling
