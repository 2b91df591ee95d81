// Which of many complaints about one trouble are worth a line: the first, and then ever fewer while it lasts.
//
// Pure and not thread safe.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>

namespace ditfleet {

class RepeatedComplaint {
 public:
  using Clock = std::chrono::steady_clock;

  // Set: this one is to be said, followed by this text (empty, or how many were passed over since the one said before).
  // The first is; after that what comes 1 s later, 2 s after that one, doubled up to a minute.
  std::optional<std::string> said(Clock::time_point now = Clock::now()) {
    if (now < next_) {
      ++passed_over_;
      return std::nullopt;
    }
    next_ = now + pause_;
    pause_ = std::min(2 * pause_, kLongest);
    const int untold = passed_over_;
    passed_over_ = 0;
    return untold == 0 ? std::string() : " (" + std::to_string(untold) + " more like this since the last line)";
  }

  // The trouble is over: the next one is a new one.
  void over() { *this = {}; }

 private:
  static constexpr Clock::duration kLongest = std::chrono::seconds(60);
  Clock::time_point next_ = Clock::time_point::min();
  Clock::duration pause_ = std::chrono::seconds(1);
  int passed_over_ = 0;
};

}  // namespace ditfleet
