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

  // Returns nothing if the message must be dropped. Otherwise log the message and append the returned text, which is
  // empty or the number of messages dropped since the last one. After the first message, messages are dropped for 1 s.
  // This pause doubles with each logged message, up to a minute.
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

  // Call this when the problem has ended. The next message then counts as the first.
  void reset() { *this = {}; }

 private:
  static constexpr Clock::duration kLongest = std::chrono::seconds(60);
  Clock::time_point next_ = Clock::time_point::min();
  Clock::duration pause_ = std::chrono::seconds(1);
  int dropped_ = 0;
};

}  // namespace ditfleet
