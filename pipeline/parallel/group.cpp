#include "pipeline/parallel/group.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

namespace ditfleet::pipeline::parallel {

Result<void> Group::all_gather(const at::Tensor& send, std::span<const at::Tensor> receive) {
  return all_to_all({&send, 1}, receive);
}

Result<bool> Group::agree(bool mine) {
  const at::Tensor answer = at::full({1}, mine, at::TensorOptions(at::kByte));
  if (auto done = on_host().broadcast(answer, 0); !done) return done.error();
  return *answer.const_data_ptr<std::uint8_t>() != 0;
}

Result<void> Group::check(std::span<const at::Tensor> send, std::span<const at::Tensor> receive) const {
  const auto ranks = static_cast<std::size_t>(size_);
  if ((send.size() != 1 && send.size() != ranks) || receive.size() != ranks)
    return invalid_argument("[parallel] a collective of " + std::to_string(ranks) + " ranks got " +
                            std::to_string(send.size()) + " tensors to send and " + std::to_string(receive.size()) +
                            " to receive");
  for (const auto& tensors : {send, receive})
    for (const at::Tensor& t : tensors)
      if (t.defined() && !(t.is_contiguous() && t.device() == device_))
        return invalid_argument("[parallel] a tensor of a collective is not contiguous or not on the group's device");
  if (bytes_of(send[send.size() == 1 ? 0 : rank_]).size() != bytes_of(receive[rank_]).size())
    return invalid_argument("[parallel] the share of rank " + std::to_string(rank_) + " for itself has two sizes");
  return {};
}

std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

}  // namespace ditfleet::pipeline::parallel
