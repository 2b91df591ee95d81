#include "pipeline/region/libraries/gemm.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <optional>

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

class LtGemm : public Gemm {
 public:
  LtGemm(int device, std::shared_ptr<const CublasLt> library)
      : device_(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)), library_(std::move(library)) {}

  bool run(GemmEpilogue epilogue, ElementType type, std::int64_t rows, std::int64_t in, std::int64_t out,
           std::int64_t x_stride, std::int64_t weight_stride, std::int64_t out_stride,
           const GemmOperands& operands) const override {
    const GemmShape shape{type,
                          epilogue,
                          rows,
                          in,
                          out,
                          x_stride,
                          weight_stride,
                          out_stride,
                          {alignment_of(operands.x), alignment_of(operands.weight), alignment_of(operands.out)}};
    const auto algorithm = algorithm_for(shape);
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

 private:
  std::optional<GemmAlgorithm> algorithm_for(const GemmShape& shape) const {
    const std::lock_guard lock(mutex_);
    const auto [known, added] = algorithms_.try_emplace(shape);
    if (added)
      if (auto found = library_->algorithm(shape, kWorkspaceBytes)) known->second = *found;
    return known->second;
  }

  const c10::Device device_;
  const std::shared_ptr<const CublasLt> library_;
  mutable std::mutex mutex_;
  mutable std::map<GemmShape, std::optional<GemmAlgorithm>> algorithms_;
};

}  // namespace

std::shared_ptr<const Gemm> make_gemm(int device) {
  return std::make_shared<LtGemm>(device, pipeline::unwrap(CublasLt::open()));
}

}  // namespace ditfleet::region
