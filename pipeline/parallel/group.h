// Collectives among the ranks that work on one job, each a process with a device.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <span>

#include "shared/core/result.h"

namespace at {
class Tensor;
}

namespace ditfleet::pipeline::parallel {

class Exchange;

// One rank's membership. All ranks call the same functions in the same order, one thread at a time; only abort() may be
// called from any thread. Tensors are contiguous and on the group's device, of any dtype; an undefined tensor is empty.
// Sent tensors must not overlap received ones, except that a rank's own share may be the same memory.
//
// Errors of all functions: kUnavailable (a rank did not arrive in time, or the group was aborted), kDeviceFault,
// kInvalidArgument (a bug: wrong device, number or sizes of tensors). After an error the group must be aborted.
class Group {
 public:
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Sends send[r] to rank r and receives receive[r] from it, for each of the size() ranks. With a single tensor in
  // `send`, sends that to all. Shares may have any size, also none; both sides know it. On a GPU enqueues the work on
  // the current stream.
  virtual Result<void> all_to_all(std::span<const at::Tensor> send, std::span<const at::Tensor> receive) = 0;
  // Sends `send` to all ranks and receives that of rank r in receive[r]. Sizes may differ between ranks.
  Result<void> all_gather(const at::Tensor& send, std::span<const at::Tensor> receive);
  // Copies the tensor of rank `root` to the tensors of all others, which have the same size. On a GPU enqueues the
  // work on the current stream.
  virtual Result<void> broadcast(const at::Tensor& tensor, int root) = 0;
  // What rank 0 passes, in all ranks. Waits for rank 0, but not for a GPU.
  Result<bool> agree(bool mine);

  // How the ranks write rows into each other's memory without a collective; null: not at all.
  virtual Exchange* exchange() { return nullptr; }

  // Makes present and later calls return kUnavailable.
  virtual void abort() noexcept = 0;

 protected:
  Group(int rank, int size, c10::Device device) : rank_(rank), size_(size), device_(device) {}

  c10::Device device() const { return device_; }
  // For messages in host memory.
  virtual Group& on_host() { return *this; }
  // kInvalidArgument unless all tensors are contiguous and on the device, `receive` has one for each rank, and this
  // rank sends itself as many bytes as it expects. `send` is one tensor for all ranks or one for each.
  Result<void> check(std::span<const at::Tensor> send, std::span<const at::Tensor> receive) const;

 private:
  const int rank_, size_;
  const c10::Device device_;
};

// The tensor's memory; null and 0 if it is undefined.
std::span<std::byte> bytes_of(const at::Tensor& tensor);

}  // namespace ditfleet::pipeline::parallel
