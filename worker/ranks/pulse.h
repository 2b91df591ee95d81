// Finds ranks of a worker whose process is stopped: each rank counts in memory that all share.
//
// A rank is silent when another one has counted for kSilent without it. So the time in which all are stopped, or get no
// processor, does not count.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::worker {

inline constexpr std::chrono::milliseconds kTick{100}, kSilent{2000};

using TickCount = std::atomic<std::uint32_t>;  // 0: the rank has not begun

// No clock, no threads. Not thread-safe.
class SilentRanks {
 public:
  SilentRanks(int self, int size) : self_(self), seen_(static_cast<std::size_t>(size)) {}
  // Call it once per tick of this rank. Returns a rank that is silent.
  std::optional<int> check(std::span<const TickCount> counts);
  // The rank gets the whole time again.
  void forgive(int rank) { seen_[static_cast<std::size_t>(rank)].ticks = 0; }

 private:
  struct Seen {
    std::uint32_t count = 0;
    int ticks = 0;  // of this rank, since the other one has counted
  };
  const int self_;
  std::vector<Seen> seen_;
};

// The counters of all ranks. Processes that are forked share them; nothing is left when the last one has ended.
class PulseMemory {
 public:
  // Errors: kUnavailable (no memory).
  static Result<std::shared_ptr<PulseMemory>> create(int size);
  ~PulseMemory();
  PulseMemory(const PulseMemory&) = delete;
  PulseMemory& operator=(const PulseMemory&) = delete;
  std::span<TickCount> counts() const { return counts_; }

 private:
  explicit PulseMemory(std::span<TickCount> counts) : counts_(counts) {}
  const std::span<TickCount> counts_;
};

// A thread that counts for this rank until it is destroyed. It calls `silent` with each rank that is silent, every
// kSilent.
class Pulse {
 public:
  Pulse(std::shared_ptr<PulseMemory> memory, int self, std::function<void(int rank)> silent);
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;
  std::thread thread_;  // last: uses the other members
};

// Whether a debugger is attached to the process.
bool is_debugged(pid_t process);
// "[ranks] rank 1 (process 42)"
std::string rank_name(int rank, pid_t process);

}  // namespace ditfleet::worker
