// A point on the monotonic clock by which an operation must end.
#pragma once

#include <chrono>

namespace ditfleet {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(Clock::duration d) { return Deadline(Clock::now() + d); }
  static Deadline at(Clock::time_point t) { return Deadline(t); }
  // A deadline that never passes.
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  Clock::time_point time_point() const { return at_; }
  bool passed() const { return Clock::now() >= at_; }
  Clock::duration left() const { return at_ - Clock::now(); }

 private:
  explicit Deadline(Clock::time_point t) : at_(t) {}
  Clock::time_point at_;
};

}  // namespace ditfleet
