// Circuit breaker: stops calls to a failing server. No I/O, no clock.
//
//   closed     all calls are allowed; several failures (errors or slow replies) in a row open the breaker
//   open       no call is allowed; after a pause the breaker becomes half open
//   half open  one call, the probe, is allowed; success closes the breaker, failure opens it for twice as long
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

namespace ditfleet::kernel_cache {

// Not thread-safe.
class Breaker {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    int failures = 3;                            // in a row
    std::chrono::milliseconds slow{500};         // a slower reply counts as a failure
    std::chrono::milliseconds open_first{1000};  // the first pause; doubles with each failed probe
    std::chrono::milliseconds open_max{30'000};
  };
  enum class State { kClosed, kHalfOpen, kOpen };

  // An allowed call: its time, and the period between two changes of state in which it started.
  struct Ticket {
    std::uint64_t period = 0;
    Clock::time_point at;
  };

  explicit Breaker(Options options) : options_(options), pause_(options.open_first) {}

  // Returns nothing if the call is not allowed. Otherwise the caller must report the outcome with leave().
  std::optional<Ticket> enter(Clock::time_point now) {
    if (state_ == State::kOpen && now >= until_) become(State::kHalfOpen);
    if (state_ == State::kOpen || probing_) return std::nullopt;
    probing_ = state_ == State::kHalfOpen;
    return Ticket{period_, now};
  }

  // Ignores the outcome of a call from an earlier period.
  void leave(const Ticket& ticket, bool good, Clock::time_point now) {
    if (ticket.period != period_) return;
    if (good && now - ticket.at <= options_.slow) {
      failures_ = 0;
      if (state_ == State::kHalfOpen) {
        pause_ = options_.open_first;
        become(State::kClosed);
      }
      return;
    }
    if (state_ == State::kClosed && ++failures_ < options_.failures) return;
    if (state_ == State::kHalfOpen) pause_ = std::min(pause_ * 2, options_.open_max);
    until_ = now + pause_;
    become(State::kOpen);
  }

  State state() const { return state_; }

 private:
  void become(State state) {
    state_ = state;
    ++period_;
    failures_ = 0;
    probing_ = false;
  }

  Options options_;
  State state_ = State::kClosed;
  std::chrono::milliseconds pause_;
  Clock::time_point until_{};  // the end of the pause
  std::uint64_t period_ = 0;
  int failures_ = 0;
  bool probing_ = false;
};

}  // namespace ditfleet::kernel_cache
