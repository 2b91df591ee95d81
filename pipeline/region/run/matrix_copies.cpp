#include "pipeline/region/run/matrix_copies.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>

#include "pipeline/device/failure.h"
#include "pipeline/region/backends/gpu_module.h"
#include "pipeline/region/backends/matrix_copies.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::region {
namespace {

constexpr long long kParts = 8;  // blocks of a copy

class OneByOne : public MatrixCopies {
 public:
  void run(const std::vector<TensorCopy>& copies) const override {
    for (const TensorCopy& copy : copies) {
      if (!copy.from.defined()) {
        copy.to.zero_();
        continue;
      }
      copy.to.copy_(copy.from);
      if (copy.scale != 1) copy.to.mul_(copy.scale);
    }
  }
};

class OneLaunch : public MatrixCopies {
 public:
  explicit OneLaunch(std::shared_ptr<const GpuModule> module) : module_(std::move(module)) {}

  void run(const std::vector<TensorCopy>& copies) const override {
    std::vector<MatrixCopy> table;
    for (const TensorCopy& copy : copies) {
      if (copy.to.numel() == 0) continue;
      table.push_back({.to = address(copy.to), .from = copy.from.defined() ? address(copy.from) : 0, .rows = copy.to.size(0), .columns = copy.to.size(1),
                       .to_stride = copy.to.stride(0), .from_stride = copy.from.defined() ? copy.from.stride(0) : 0, .scale = copy.scale});
    }
    if (table.empty()) return;
    const at::Tensor& any = copies.front().to;
    const auto bytes = static_cast<std::int64_t>(table.size() * sizeof table.front());
    const at::Tensor on_device = at::from_blob(table.data(), {bytes}, at::TensorOptions(c10::ScalarType::Byte)).to(any.device());
    const auto count = static_cast<long long>(table.size());
    const c10::impl::VirtualGuardImpl guard(any.device().type());
    pipeline::unwrap(module_->start(any.scalar_type() == c10::ScalarType::BFloat16 ? 0 : 1, GpuModule::kI64Vector, count * kParts,
                                    {address(on_device), count, kParts}, guard.getStream(any.device()).native_handle()));
  }

 private:
  static long long address(const at::Tensor& t) { return reinterpret_cast<long long>(t.const_data_ptr()); }

  const std::shared_ptr<const GpuModule> module_;
};

Result<std::shared_ptr<const GpuModule>> load(RegionHost& host) {
  const auto begun = std::chrono::steady_clock::now();
  auto program = compile_matrix_copies(*host.cache, *host.compiler, host.arch);
  if (!program) return program.error();
  host.counters->program_took(host.compiler->name(), program->compiled,
                              std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun));
  return GpuModule::load(*program->entry, matrix_copies_source(), host.device);
}

}  // namespace

std::shared_ptr<const MatrixCopies> make_matrix_copies(RegionHost& host) {
  if (!host.compiler || host.compiler->output_kind() != kernel_cache::Kind::kCubin) return std::make_shared<OneByOne>();
  auto module = load(host);
  if (module) return std::make_shared<OneLaunch>(*module);
  host.counters->fell_back("matrix_copies", "compile_error", module.error().message, true);
  return std::make_shared<OneByOne>();
}

}  // namespace ditfleet::region
