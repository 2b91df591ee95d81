// Collectives of CPU ranks on one host, through shared memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "pipeline/parallel/group.h"
#include "shared/core/unique_fd.h"

namespace ditfleet::pipeline::parallel {

// Creates the memory of a group: a file without a name, so nothing is left when its processes have died. The other
// ranks, 32 at most in all, get the descriptor by inheritance or over a socket. Each rank has two buffers of
// `staging_bytes`; longer messages take several rounds. `timeout`: the longest wait for other ranks in one round.
// Errors: kInvalidArgument (ranks or bytes), kUnavailable (no memory).
Result<UniqueFd> create_group_memory(int size, std::chrono::milliseconds timeout,
                                     std::uint64_t staging_bytes = std::uint64_t{1} << 20);

// Joins as a rank that no other process or thread has. Does not wait for the others and does not keep the descriptor.
// Its abort() ends the calls of all ranks, and so does a rank that does not arrive in time: all errors then name the
// missing ranks. Errors: kInvalidArgument (rank), kUnavailable (the memory cannot be mapped).
Result<std::unique_ptr<Group>> join_group_memory(int fd, int rank);

}  // namespace ditfleet::pipeline::parallel
