// Finds work of units that makes no progress: a thread that hangs in a driver, a library or the file system. Such work
// cannot be interrupted, so the service fails the unit and ends the process. No clock, no threads, no I/O.
//
// Covers what units do on the threads "device", "text", "encode", "adapters" and "adapter files". Loading and warming
// up the models is not covered: before that the worker has no units, and compiling may take long.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace ditfleet::worker {

// Not thread-safe.
class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Work { kAdapters, kText, kFirstStep, kStep, kPreview, kDecode, kImage };

  // Work is stuck after `least`, or 20 times the slowest of its kind and class seen so far, whichever is longer. The
  // first of a class may compile programs, and adapters differ in size: they have five times `least`.
  // `ranks`: several wait for each other in each step. After the first image of a class, whose steps may compile
  // programs and load weights, its later steps are stuck after 2.5 s (`least` / 24, if that is more) and twice
  // the slowest of them.
  explicit Watchdog(std::chrono::milliseconds least, bool ranks = false) : least_(least), ranks_(ranks) {}

  // The unit begins this work, and what it did before has ended.
  void began(const std::string& nonce, Work work, const std::string& class_key, Clock::time_point now);
  // Units share the threads that load adapters, so a chunk that one of them reads is progress for all.
  void adapters_progressed(Clock::time_point now);
  // The unit has ended its work. Unknown nonces are ignored.
  void ended(const std::string& nonce, Clock::time_point now);

  struct Stuck {
    std::string nonce, message;
  };
  // Call it every interval(). Time in which no function was called for longer does not count, because the process was
  // stopped then.
  std::optional<Stuck> check(Clock::time_point now);
  std::chrono::milliseconds interval() const;

 private:
  using Kind = std::pair<Work, std::string>;  // and the class
  struct Watch {
    Kind kind;
    Clock::time_point since;
  };
  Clock::duration limit(const Kind& kind) const;
  void skip_stop(Clock::time_point now);

  const std::chrono::milliseconds least_;
  const bool ranks_;
  std::map<std::string, Watch> watches_;  // by nonce
  std::map<Kind, Clock::duration> slowest_;
  std::optional<Clock::time_point> checked_;
};

}  // namespace ditfleet::worker
