#include "pipeline/memory/dry_run.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

#include "pipeline/device/cpu.h"

namespace ditfleet::pipeline {
namespace {

std::atomic<std::int64_t> bytes_now = 0, bytes_peak = 0;

// The address of a tensor's storage is null; the context holds its size.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const auto size = static_cast<std::int64_t>(bytes);
    const std::int64_t now = bytes_now.fetch_add(size) + size;
    for (std::int64_t peak = bytes_peak; now > peak && !bytes_peak.compare_exchange_weak(peak, now);) {
    }
    return {nullptr, new std::int64_t(size), &release, kDryDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, std::size_t) const override {}

 private:
  static void release(void* context) {
    const auto* const size = static_cast<std::int64_t*>(context);
    bytes_now -= *size;
    delete size;
  }
};

void count_from_now() {
  static const bool counting = [] {
    c10::SetAllocator(c10::DeviceType::Meta, new CountingAllocator,
                      /*priority=*/100);  // tensors may outlive everything
    return true;
  }();
  (void)counting;
}

// Attention as the fused kernels compute it: the result alone, token by token. LibTorch would allocate all scores.
at::Tensor attention(const at::Tensor& q, const at::Tensor&, const at::Tensor& v, const std::optional<at::Tensor>&,
                     double, bool, std::optional<double>, bool) {
  return at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>&,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool,
                       c10::SymIntArrayRef, c10::SymInt) {
  std::vector<std::int64_t> sizes{x.size(0), weight.size(0)};
  for (std::int64_t axis = 2; axis < x.dim(); ++axis) {
    const auto of = [&](c10::SymIntArrayRef values) {  // one for all axes, or one each
      return values[values.size() == 1 ? 0 : static_cast<std::size_t>(axis) - 2].expect_int();
    };
    sizes.push_back((x.size(axis) + 2 * of(padding) - of(dilation) * (weight.size(axis) - 1) - 1) / of(stride) + 1);
  }
  const at::Tensor out = at::empty(sizes, x.options(), x.suggest_memory_format());
  if (x.suggest_memory_format() == c10::MemoryFormat::Contiguous) {
    // oneDNN reorders the input, and then the output, in blocks of channels.
    const std::int64_t block = has_avx512() ? 16 : 8;
    const auto reordered = [&](const at::Tensor& y) {
      return y.numel() / y.size(1) * ((y.size(1) + block - 1) / block * block);
    };
    at::empty({std::max(reordered(x), reordered(out))}, x.options());
  }
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm(const at::Tensor& x, const std::optional<at::Tensor>&,
                                                          const std::optional<at::Tensor>&, c10::SymInt n, c10::SymInt,
                                                          c10::SymInt, std::int64_t groups, double) {
  const at::Tensor statistic = at::empty({n.expect_int(), groups}, x.options());
  return {at::empty(x.sizes(), x.options(), x.suggest_memory_format()), statistic, statistic};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(const at::Tensor& x, c10::SymIntArrayRef shape,
                                                          const std::optional<at::Tensor>&,
                                                          const std::optional<at::Tensor>&, double) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  std::fill(sizes.end() - static_cast<std::ptrdiff_t>(shape.size()), sizes.end(), 1);
  const at::Tensor statistic = at::empty(sizes, x.options());
  return {at::empty(x.sizes(), x.options()), statistic, statistic};
}

at::Tensor elementwise(const at::Tensor& x) { return at::empty(x.sizes(), x.options(), x.suggest_memory_format()); }

at::Tensor index_select(const at::Tensor& x, std::int64_t axis, const at::Tensor& index) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(axis)] = index.numel();
  return at::empty(sizes, x.options());
}

}  // namespace

std::mutex& dry_run_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::int64_t dry_bytes() {
  count_from_now();
  return bytes_now;
}
std::int64_t dry_peak() { return bytes_peak; }
void start_dry_peak() {
  count_from_now();
  bytes_peak = bytes_now.load();
}

}  // namespace ditfleet::pipeline

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("scaled_dot_product_attention", &ditfleet::pipeline::attention);
  library.impl("convolution", &ditfleet::pipeline::convolution);
  library.impl("native_group_norm", &ditfleet::pipeline::group_norm);
  library.impl("native_layer_norm", &ditfleet::pipeline::layer_norm);
  library.impl("relu", &ditfleet::pipeline::elementwise);
  library.impl("abs", &ditfleet::pipeline::elementwise);
  library.impl("index_select", &ditfleet::pipeline::index_select);
}
