#include "pipeline/region/libraries/gemm.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"

namespace ditfleet::region {
namespace {

constexpr std::uint64_t kWorkspaceBytes = std::uint64_t{32} << 20;  // what NVIDIA advises for Hopper and later

std::uint16_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  return static_cast<std::uint16_t>(
      address == 0 ? 256 : std::min<std::uintptr_t>(256, std::uintptr_t{1} << std::countr_zero(address)));
}

}  // namespace

Gemm::Gemm(int device)
    : device_(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)),
      library_(pipeline::unwrap(CublasLt::open())) {}

bool Gemm::run(GemmShape shape, const GemmOperands& operands) const {
  shape.alignment = {alignment_of(operands.x), alignment_of(operands.weight), alignment_of(operands.out)};
  const auto algorithm = algorithm_for(shape, operands);
  if (!algorithm) return false;
  // The workspace returns to the allocator at once: its next user on this stream comes later in the stream's order.
  at::Tensor workspace;
  if (algorithm->workspace_bytes > 0)
    workspace = at::empty({static_cast<std::int64_t>(algorithm->workspace_bytes)},
                          at::TensorOptions(c10::ScalarType::Byte).device(device_));
  pipeline::unwrap(library_->run(shape, operands, *algorithm, workspace.defined() ? workspace.data_ptr() : nullptr,
                                 pipeline::current_stream(device_)));
  return true;
}

std::optional<GemmAlgorithm> Gemm::algorithm_for(const GemmShape& shape, const GemmOperands& operands) const {
  const std::lock_guard lock(mutex_);
  const auto [known, added] = algorithms_.try_emplace(shape);
  if (added)
    if (auto found = library_->algorithm(shape, operands, kWorkspaceBytes)) known->second = *found;
  return known->second;
}

}  // namespace ditfleet::region
