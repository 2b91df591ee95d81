// Throttles repeated log messages: logs the first, then backs off exponentially.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>

namespace ditfleet {

// Not thread-safe.
class LogThrottle {
 public:
  using Clock = std::chrono::steady_clock;

  // Set: log this message, followed by this text (empty, or how many messages were dropped since the last one). The
  // first message is logged. The pause after it is 1 s and doubles with each message, up to a minute.
  std::optional<std::string> admit(Clock::time_point now = Clock::now()) {
    if (now < next_) {
      ++dropped_;
      return std::nullopt;
    }
    next_ = now + pause_;
    pause_ = std::min(2 * pause_, kLongest);
    const int dropped = dropped_;
    dropped_ = 0;
    return dropped == 0 ? std::string() : " (" + std::to_string(dropped) + " more like this since the last message)";
  }

  // The condition has ended: the next message is the first of a new one.
  void reset() { *this = {}; }

 private:
  static constexpr Clock::duration kLongest = std::chrono::seconds(60);
  Clock::time_point next_ = Clock::time_point::min();
  Clock::duration pause_ = std::chrono::seconds(1);
  int dropped_ = 0;
};

}  // namespace ditfleet
