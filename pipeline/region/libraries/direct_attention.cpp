#include "pipeline/region/libraries/direct_attention.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <spdlog/spdlog.h>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/region/libraries/attention_table.h"
#include "pipeline/region/libraries/driver.h"

namespace ditfleet::region {
namespace {

AttentionShape::Strides strides_of(const at::Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

class FlashAttention : public DirectAttention {
 public:
  std::string name() const override { return "flash"; }
  bool run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
           const at::Tensor&) const override {
    if (q.dim() != 4 || q.scalar_type() != c10::ScalarType::BFloat16 || q.size(3) % 8 != 0 || q.size(3) > 256)
      return false;
    out.copy_(attend(q, k, v, AttentionBackend::kFlash));
    return true;
  }
};

// The best guess first.
std::vector<std::shared_ptr<const DirectAttention>> all_of(int device, const std::string& arch,
                                                           const std::shared_ptr<kernel_cache::KernelCache>& cache) {
  std::vector<std::shared_ptr<const DirectAttention>> all{make_cudnn_attention(device, arch, cache),
                                                          make_flash_attention()};
  const bool hopper = arch.starts_with("sm_90");
  if (!hopper && !arch.starts_with("sm_10")) std::swap(all[0], all[1]);  // LibTorch's preferences
  std::string missing = hopper ? "" : "; fa3 needs a GPU of sm_90";
  if (hopper) {
    if (auto flash3 = open_flash3())
      all.insert(all.begin(), *flash3);
    else
      missing = "; " + flash3.error().message;
  }
  std::string names;
  for (const auto& one : all) names += (names.empty() ? "" : ", ") + one->name();
  spdlog::info("attention: the fastest of {}{}", names, missing);
  return all;
}

}  // namespace

AttentionShape attention_shape(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out) {
  return {
      q.size(0),     q.size(1),     k.size(1),     q.size(2),       q.size(3),
      strides_of(q), strides_of(k), strides_of(v), strides_of(out), q.scalar_type() == c10::ScalarType::Float8_e4m3fn};
}

bool is_operand(const at::Tensor& t, c10::ScalarType type) {
  return t.dim() == 4 && t.numel() > 0 && t.scalar_type() == type && has_aligned_rows(t);
}

std::shared_ptr<const DirectAttention> make_flash_attention() { return std::make_shared<FlashAttention>(); }

std::shared_ptr<const DirectAttention> make_direct_attention(int device, const std::string& arch,
                                                             AttentionBackend backend,
                                                             std::shared_ptr<kernel_cache::KernelCache> cache) {
  if (backend == AttentionBackend::kCudnn) return make_cudnn_attention(device, arch, std::move(cache));
  if (backend == AttentionBackend::kFlash3) {
    if (!arch.starts_with("sm_90"))
      pipeline::fail(Code::kUnavailable,
                     "compile.attention is fa3, which needs a GPU of sm_90, but this one is " + arch + "; use auto",
                     "compile.attention");
    return pipeline::unwrap(open_flash3());
  }
  if (backend != AttentionBackend::kAuto) return nullptr;
  return std::make_shared<const AttentionTable>(
      pipeline::unwrap(gpu_identity(device)), arch, cache, [=] { return all_of(device, arch, cache); },
      gpu_timer(device));
}

void open_attention(c10::Device device, c10::ScalarType type, std::int64_t heads, std::int64_t head_dim,
                    AttentionBackend backend, const DirectAttention* direct) {
  const c10::InferenceMode inference(true);
  const c10::DeviceGuard guard(device);
  const at::Tensor x = at::zeros({1, 64, heads, head_dim}, at::TensorOptions(type).device(device));
  if (!direct || !direct->run(x, x, x, at::empty_like(x))) attend(x, x, x, backend);
  pipeline::synchronize(device);
}

}  // namespace ditfleet::region
