// One-sided exchanges among the ranks of a host: each rank copies rows to where the others need them, then raises a
// flag there. Only the devices wait for flags; no rank waits on its host.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "pipeline/parallel/shared_memory.h"

namespace ditfleet::pipeline::parallel {

// Rows of a rank's device memory, at equal distances.
struct Rows {
  const std::byte* data;
  std::size_t pitch, width, count;  // bytes from row to row, bytes of a row, rows
};

// What an exchange needs of a rank's device, which does its work later and in order: on the current stream, and copies
// and flags on a second one. All functions but meet() return at once. Not thread-safe.
// Errors of all functions: kDeviceFault.
class CopyDevice {
 public:
  virtual ~CopyDevice() = default;

  // Called by all ranks of the group with the same size. Waits for the current stream and then for the other ranks.
  // Afterwards each rank has at least `bytes` of memory that the others can write to. False: a rank has not got it, and
  // all have lost what they had. Errors: also kUnavailable (a rank does not arrive).
  virtual Result<bool> meet(std::size_t bytes) = 0;
  // That memory of a rank, aligned to 256 bytes, at its address in this process.
  virtual std::byte* memory(int rank) const = 0;

  virtual Result<void> copies_follow() = 0;  // later copies begin after the work on the current stream
  virtual Result<void> follow_copies() = 0;  // later work on the current stream begins after the copies
  virtual Result<void> copy(const Rows& from, std::byte* to, std::size_t to_pitch) = 0;
  // Writes this rank's flag at another rank when the copies before have been done.
  virtual Result<void> raise(int rank, std::uint32_t round) = 0;
  // Lets later work on the current stream wait until the flag of another rank here is at least `round`.
  virtual Result<void> wait(int rank, std::uint32_t round) = 0;
};

// The trips of rows among the ranks of a team: there, and back. Each rank has a slot in its memory for either way; all
// the others of the team write to it at once.
//
// The ranks need not acknowledge that they have read a slot. A rank writes to the slots of the way there again only
// after all flags of the way back before have arrived; another rank raised these after the work that had read its slot
// of the way there, because both are in the order of its stream. For the way back it is the same with the flags of the
// way there. So a rank is ahead of another by one way at most. Before slots are placed differently, or the team
// changes, all ranks meet.
//
// One thread at a time, except check() and release(). Errors of all functions: kUnavailable (a rank is missing, or the
// group was aborted), kDeviceFault, kInvalidArgument (a bug: wrong order of calls).
class Exchange {
 public:
  using Clock = std::chrono::steady_clock;
  using Bytes = std::array<std::size_t, 2>;  // of a slot for the way there and one for the way back

  // `host`: of the same ranks; outlives the exchange.
  Exchange(HostGroup& host, std::unique_ptr<CopyDevice> device);

  // Begins a trip of ranks first … first + count − 1; all ranks of the group begin one at a time, perhaps in several
  // teams, with the same sizes. The copies begin after the work on the current stream. False: a rank has no memory for
  // slots of this size; all ranks get this answer.
  Result<bool> begin(int first, int count, Bytes slots);
  // Whether rows are on their way there.
  bool begun() const { return phase_ == Phase::kThere; }
  // Copies rows to `offset` in a rank's slot of the present way, at a distance of `pitch`. They must stay as they are
  // until wait().
  Result<void> send(int rank, const Rows& rows, std::size_t offset, std::size_t pitch);
  // The rank has got all rows of this way. Not for this rank itself.
  Result<void> raise(int rank);
  // Lets later work on the current stream wait for this rank's copies and the other ranks' rows, after raise() for each
  // of them. Returns the slot with the rows, which work on this stream may read until the next turn() or begin().
  Result<std::byte*> wait();
  // Begins the way back. The copies begin after the work on the current stream.
  Result<void> turn();

  // Reports ranks that have not sent the rows of a round for as long as the group's timeout, although this rank has.
  // After a failure of the group ends what the device waits for. Call it about every 20 ms; `now` is monotonic.
  void check(Clock::time_point now);
  // Ends what the device waits for. What it computes then is worthless, so the group must have failed.
  void release() noexcept;

 private:
  enum class Phase { kIdle, kThere, kArrived, kBack };
  struct Seen {
    std::uint32_t round = 0;  // of the other rank
    bool late = false;
    Clock::time_point since;
  };

  Result<void> expect(Phase phase) const;
  std::size_t offset() const { return phase_ == Phase::kThere ? 0 : back_; }

  HostGroup& host_;
  const std::unique_ptr<CopyDevice> device_;
  Phase phase_ = Phase::kIdle;
  int first_ = 0, count_ = 0;
  Bytes slots_ = {};
  bool refused_ = false;                                      // slots of this size
  std::uint64_t raised_ = 0;                                  // on this way: a bit for each rank
  std::size_t back_ = 0;                                      // where the slot of the way back begins
  std::array<std::atomic<std::uint32_t>, kMostRanks> round_;  // the last one with each rank
  std::array<Seen, kMostRanks> seen_;
  Clock::time_point checked_;
};

// A group whose ranks can also exchange rows: `base`, with an exchange. Fails as `host` does, and ends what the devices
// wait for when a rank is missing or any rank aborts.
std::unique_ptr<Group> add_exchange(std::unique_ptr<Group> base, std::shared_ptr<HostGroup> host,
                                    std::unique_ptr<Exchange> exchange, c10::Device device);

}  // namespace ditfleet::pipeline::parallel
