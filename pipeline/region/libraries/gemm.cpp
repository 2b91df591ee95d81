#include "pipeline/region/libraries/gemm.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/region/libraries/driver.h"
#include "pipeline/region/libraries/plan_key.h"
#include "pipeline/region/libraries/timing.h"
#include "shared/kernel_cache/cache.h"

namespace ditfleet::region {
namespace {

constexpr std::uint64_t kWorkspaceBytes = std::uint64_t{32} << 20;  // what NVIDIA advises for Hopper and later
constexpr int kCandidates = 8;

std::uint16_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  return static_cast<std::uint16_t>(
      address == 0 ? 256 : std::min<std::uintptr_t>(256, std::uintptr_t{1} << std::countr_zero(address)));
}

class LtGemm : public Gemm {
 public:
  LtGemm(int device, std::string arch, std::shared_ptr<kernel_cache::KernelCache> cache,
         std::shared_ptr<const CublasLt> library, GpuIdentity gpu)
      : device_(static_cast<c10::DeviceIndex>(device)),
        arch_(std::move(arch)),
        cache_(std::move(cache)),
        library_(std::move(library)),
        gpu_(std::move(gpu)) {}

  bool run(bool tune, GemmEpilogue epilogue, ElementType type, std::int64_t rows, std::int64_t in, std::int64_t out,
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
    const auto algorithm = choose(shape, operands, tune);
    if (!algorithm) return false;
    start(shape, operands, *algorithm);
    return true;
  }

 private:
  void* stream() const { return pipeline::current_stream(c10::Device(c10::DeviceType::CUDA, device_)); }

  // The workspace goes back to the allocator at once: whoever gets it next on this stream comes later on it.
  void start(const GemmShape& shape, const GemmOperands& operands, const GemmAlgorithm& algorithm) const {
    at::Tensor workspace;
    if (algorithm.workspace_bytes > 0)
      workspace =
          at::empty({static_cast<std::int64_t>(algorithm.workspace_bytes)},
                    at::TensorOptions(c10::ScalarType::Byte).device(c10::Device(c10::DeviceType::CUDA, device_)));
    pipeline::unwrap(
        library_->run(shape, operands, algorithm, workspace.defined() ? workspace.data_ptr() : nullptr, stream()));
  }

  std::optional<GemmAlgorithm> choose(const GemmShape& shape, const GemmOperands& operands, bool tune) const {
    std::lock_guard lock(mutex_);  // also over tuning: two threads that time at once would time each other
    tune = tune && shape.epilogue != GemmEpilogue::kAdd;  // timing would add to the output again and again
    auto& chosen = tune ? tuned_ : first_;
    if (const auto known = chosen.find(shape); known != chosen.end()) return known->second;
    return chosen[shape] = tune ? tuned(shape, operands) : first(shape);
  }

  std::optional<GemmAlgorithm> first(const GemmShape& shape) const {
    auto found = library_->algorithms(shape, kWorkspaceBytes, 1);
    if (!found) return {};
    return found->front();
  }

  std::optional<GemmAlgorithm> tuned(const GemmShape& shape, const GemmOperands& operands) const {
    const auto key = plan_key(shape);
    // Where workspaces cannot be tried out, somebody else's choice or the first suggestion: what was timed without them
    // would be kept as if it were the best with them.
    const auto found =
        !room_for_trial(kWorkspaceBytes)
            ? cache_->find(key, arch_)
            : cache_->get_or_compile(
                  key, "gemm", arch_,
                  [&]() -> Result<kernel_cache::Entry> {
                    const auto best = measure(shape, operands);
                    if (!best) return Error{Code::kNotFound, "nothing to time for this shape", {}};
                    kernel_cache::Entry entry{.region = "gemm", .arch = arch_, .kind = kernel_cache::Kind::kPlan};
                    entry.code.resize(sizeof best->words + sizeof best->workspace_bytes);
                    std::memcpy(entry.code.data(), best->words.data(), sizeof best->words);
                    std::memcpy(entry.code.data() + sizeof best->words, &best->workspace_bytes,
                                sizeof best->workspace_bytes);
                    return entry;
                  },
                  [](const kernel_cache::Entry& entry) {
                    return algorithm_of(entry) ? Result<void>()
                                               : Error{Code::kDataCorrupt, "it is no algorithm of a product", {}};
                  });
    const auto made = found ? algorithm_of(**found) : std::nullopt;
    return made ? made : first(shape);
  }

  static std::optional<GemmAlgorithm> algorithm_of(const kernel_cache::Entry& entry) {
    GemmAlgorithm made;
    if (entry.kind != kernel_cache::Kind::kPlan || entry.code.size() != sizeof made.words + sizeof made.workspace_bytes)
      return {};
    std::memcpy(made.words.data(), entry.code.data(), sizeof made.words);
    std::memcpy(&made.workspace_bytes, entry.code.data() + sizeof made.words, sizeof made.workspace_bytes);
    return made.workspace_bytes <= kWorkspaceBytes ? std::optional(made) : std::nullopt;
  }

  // The plan key: everything that the measured order may depend on.
  kernel_cache::Key plan_key(const GemmShape& s) const {
    auto key = plan_key_of("gemm", 1, gpu_);
    key.add("library", "cublasLt").add("version", static_cast<std::int64_t>(library_->version()));
    key.add("type", name_of(s.type))
        .add("epilogue", static_cast<int>(s.epilogue))
        .add("rows", s.rows)
        .add("in", s.in)
        .add("out", s.out);
    key.add("x_stride", s.x_stride).add("weight_stride", s.weight_stride).add("out_stride", s.out_stride);
    for (const auto bytes : s.alignment) key.add("alignment", static_cast<int>(bytes));
    key.add("workspace", static_cast<std::int64_t>(kWorkspaceBytes))
        .add("tuning", "timed")
        .add("candidates", kCandidates);
    return key.finish();
  }

  std::optional<GemmAlgorithm> measure(const GemmShape& shape, const GemmOperands& operands) const {
    auto found = library_->algorithms(shape, kWorkspaceBytes, kCandidates);
    if (!found) return {};
    const auto best = fastest(found->size(), stream(), [&](std::size_t i) { start(shape, operands, (*found)[i]); });
    return best ? std::optional((*found)[*best]) : std::nullopt;
  }

  const c10::DeviceIndex device_;
  const std::string arch_;
  const std::shared_ptr<kernel_cache::KernelCache> cache_;
  const std::shared_ptr<const CublasLt> library_;
  const GpuIdentity gpu_;
  mutable std::mutex mutex_;
  mutable std::map<GemmShape, std::optional<GemmAlgorithm>> first_, tuned_;
};

}  // namespace

std::shared_ptr<const Gemm> make_gemm(int device, std::string arch, std::shared_ptr<kernel_cache::KernelCache> cache) {
  auto library = pipeline::unwrap(CublasLt::open());
  return std::make_shared<LtGemm>(device, std::move(arch), std::move(cache), std::move(library),
                                  pipeline::unwrap(gpu_identity(device)));
}

}  // namespace ditfleet::region
