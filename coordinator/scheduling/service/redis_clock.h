// An estimate of Redis' clock: the monotonic clock plus an offset that sync() measures.
// No I/O, no clock; not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ditfleet::scheduling {

class RedisClock {
 public:
  // `redis_us`: Redis' time in the reply to a call sent at `sent_us` and received at `received_us` (both monotonic).
  void sync(std::int64_t redis_us, std::int64_t sent_us, std::int64_t received_us) {
    offset_us_ = redis_us - (sent_us + received_us) / 2;
    // Small corrections never turn time back. A clock that was set back by more than a second is followed.
    if (last_us_ - (received_us + offset_us_) > 1'000'000) last_us_ = 0;
  }
  std::int64_t now_us(std::int64_t monotonic_us) {
    last_us_ = std::max(last_us_, monotonic_us + offset_us_);
    return last_us_;
  }

 private:
  std::int64_t offset_us_ = 0, last_us_ = 0;
};

}  // namespace ditfleet::scheduling
