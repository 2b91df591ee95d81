// Collectives of GPU ranks through NCCL, which is opened at run time; LibTorch's CUDA part also needs it.
#pragma once

#include <array>
#include <chrono>
#include <memory>

#include "pipeline/parallel/group.h"

namespace ditfleet::pipeline::parallel {

struct NcclId {
  std::array<char, 128> bytes;
};

// Call it before the process has threads. NCCL's first exchange is not authenticated, so it goes over the loopback
// device unless NCCL_SOCKET_IFNAME names another one. NVLink multicast is off unless NCCL_NVLS_ENABLE is set.
void set_nccl_environment();

// The id of a new group, made by rank 0, which must live as long as the ranks join; the caller hands it to the others.
// Errors: kUnavailable (no NCCL, or it is too old).
Result<NcclId> make_nccl_id();

// Starts to join as rank `rank` of `size`, on a GPU that load_device() has opened. Does not wait: the first collective
// does, at most for `timeout`, for the other ranks and for connections. Later ones only wait until NCCL's thread has
// enqueued them. abort() ends this rank only, and blocks until its kernels have stopped; the streams can then be
// synchronized. The destructor does the same, so synchronize the streams before. `host`: a group of the same ranks for
// agree(), which abort() aborts, too; null: agree() must not be called. Errors: kUnavailable (no NCCL, it is too old,
// or it fails).
Result<std::unique_ptr<Group>> join_nccl(const NcclId& id, int rank, int size, c10::Device device,
                                         std::chrono::milliseconds timeout, std::shared_ptr<Group> host = nullptr);

}  // namespace ditfleet::pipeline::parallel
