#include "pipeline/region/run/attention.h"

#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include "pipeline/device/device.h"

namespace ditfleet::region {

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto heads_first = [](const at::Tensor& t) { return (t.dim() > 4 ? t.flatten(0, -4) : t.dim() < 4 ? t.unsqueeze(0) : t).transpose(1, 2); };
  return at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v)).transpose(1, 2).contiguous();
}

void open_attention(c10::Device device, c10::ScalarType type, std::int64_t heads, std::int64_t head_dim) {
  const c10::InferenceMode inference(true);
  const c10::DeviceGuard guard(device);
  const at::Tensor x = at::zeros({1, 64, heads, head_dim}, at::TensorOptions(type).device(device));
  attend(x, x, x);
  pipeline::synchronize(device);
}

}  // namespace ditfleet::region
