// Collectives of CPU ranks on one host, through shared memory.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "pipeline/parallel/group.h"
#include "shared/core/unique_fd.h"

namespace ditfleet::pipeline::parallel {

inline constexpr int kMostRanks = 32;

// at[to][from]: the last round of rank `from` whose rows have arrived at rank `to`. Counts up and wraps around. A page
// of its own, so that a GPU's driver can map it.
struct alignas(4096) ArrivalFlags {
  std::array<std::array<std::atomic<std::uint32_t>, kMostRanks>, kMostRanks> at;
};

// The ranks of a host, with what exchanges (exchange.h) need beside collectives. These functions are thread-safe.
class HostGroup : public Group {
 public:
  // In the group's memory. Initially 0.
  virtual ArrivalFlags& flags() = 0;
  // How long a rank waits for the others.
  virtual std::chrono::milliseconds timeout() const = 0;
  // What the collectives of all ranks return since abort() or a timeout.
  virtual std::optional<Error> failure() const = 0;
  // Makes present and later calls of all ranks return kUnavailable with the names of these ranks (a bit for each).
  virtual void report_missing(std::uint64_t ranks) noexcept = 0;

 protected:
  using Group::Group;
};

// Creates the memory of a group: a file without a name, so nothing is left when its processes have died. The other
// ranks, kMostRanks at most in all, get the descriptor by inheritance or over a socket. Each rank has two buffers of
// `staging_bytes`; longer messages take several rounds. `timeout`: the longest wait for other ranks in one round.
// Errors: kInvalidArgument (ranks or bytes), kUnavailable (no memory).
Result<UniqueFd> create_group_memory(int size, std::chrono::milliseconds timeout,
                                     std::uint64_t staging_bytes = std::uint64_t{1} << 20);

// Joins as a rank that no other process or thread has. Does not wait for the others and does not keep the descriptor.
// Its abort() ends the calls of all ranks, and so does a rank that does not arrive in time: all errors then name the
// missing ranks. Errors: kInvalidArgument (rank), kUnavailable (the memory cannot be mapped).
Result<std::unique_ptr<HostGroup>> join_group_memory(int fd, int rank);

}  // namespace ditfleet::pipeline::parallel
