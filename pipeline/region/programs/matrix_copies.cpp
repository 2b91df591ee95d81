#include "pipeline/region/programs/matrix_copies.h"

#include <ATen/ops/from_blob.h>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/region/programs/fixed_module.h"
#include "pipeline/region/programs/matrix_copies_source.h"

namespace ditfleet::region {
namespace {

constexpr long long kParts = 8;  // blocks per copy

class OneByOne : public MatrixCopies {
 public:
  std::shared_ptr<const Ready> prepare(std::vector<TensorCopy> copies) const override {
    return std::make_shared<List>(std::move(copies));
  }

  void run(const Ready& ready) const override { run_copies(static_cast<const List&>(ready).copies); }

 private:
  struct List : Ready {
    explicit List(std::vector<TensorCopy> list) : copies(std::move(list)) {}
    const std::vector<TensorCopy> copies;
  };
};

class OneLaunch : public MatrixCopies {
 public:
  explicit OneLaunch(std::shared_ptr<const GpuModule> module) : module_(std::move(module)) {}

  std::shared_ptr<const Ready> prepare(std::vector<TensorCopy> copies) const override {
    std::vector<MatrixCopy> entries;
    for (const TensorCopy& copy : copies) {
      if (copy.to.numel() == 0) continue;
      entries.push_back({.to = address(copy.to),
                         .from = copy.from.defined() ? address(copy.from) : 0,
                         .rows = copy.to.size(0),
                         .columns = copy.to.size(1),
                         .to_stride = copy.to.stride(0),
                         .from_stride = copy.from.defined() ? copy.from.stride(0) : 0,
                         .scale = copy.scale});
    }
    auto ready = std::make_shared<Table>();
    if (entries.empty()) return ready;
    ready->count = static_cast<long long>(entries.size());
    ready->bf16 = copies.front().to.scalar_type() == c10::ScalarType::BFloat16;
    const auto bytes = static_cast<std::int64_t>(entries.size() * sizeof entries.front());
    ready->entries =
        at::from_blob(entries.data(), {bytes}, at::TensorOptions(c10::ScalarType::Byte)).to(copies.front().to.device());
    ready->copies = std::move(copies);
    return ready;
  }

  void run(const Ready& ready) const override {
    const auto& table = static_cast<const Table&>(ready);
    if (table.count == 0) return;
    pipeline::unwrap(module_->start(table.bf16 ? 0 : 1, GpuModule::kI64Vector, table.count * kParts,
                                    {address(table.entries), table.count, kParts},
                                    pipeline::current_stream(table.entries.device())));
  }

 private:
  struct Table : Ready {
    at::Tensor entries;  // a table of MatrixCopy
    std::vector<TensorCopy> copies;
    long long count = 0;
    bool bf16 = false;
  };
  static long long address(const at::Tensor& t) { return reinterpret_cast<long long>(t.const_data_ptr()); }

  const std::shared_ptr<const GpuModule> module_;
};

}  // namespace

void run_copies(const std::vector<TensorCopy>& copies) {
  for (const TensorCopy& copy : copies) {
    if (!copy.from.defined()) {
      copy.to.zero_();
      continue;
    }
    copy.to.copy_(copy.scale == 1
                      ? copy.from
                      : copy.from.mul(copy.scale));  // mul_() would round the scale to the matrix's type first
  }
}

std::shared_ptr<const MatrixCopies> make_matrix_copies(const RegionHost& host) {
  if (auto module = fixed_module(host, matrix_copies_program())) return std::make_shared<OneLaunch>(std::move(module));
  return std::make_shared<OneByOne>();
}

}  // namespace ditfleet::region
