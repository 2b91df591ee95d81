#include "pipeline/region/libraries/attention.h"

#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/scaled_dot_product_attention.h>

namespace ditfleet::region {
namespace {

// q, k, v: [.., heads, tokens, head size].
at::Tensor heads_first(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, AttentionBackend backend) {
  switch (backend) {
    case AttentionBackend::kMath: return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v));
    case AttentionBackend::kCudnn: return std::get<0>(at::_scaled_dot_product_cudnn_attention(q, k, v, {}, false));
    case AttentionBackend::kEfficient:
      return std::get<0>(at::_scaled_dot_product_efficient_attention(q, k, v, {}, false));
    case AttentionBackend::kFlash:
      return q.is_cpu() ? std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v))
                        : std::get<0>(at::_scaled_dot_product_flash_attention(q, k, v));
    case AttentionBackend::kFlash3:
    case AttentionBackend::kAuto: break;
  }
  return at::scaled_dot_product_attention(q, k, v);
}

}  // namespace

const std::vector<AttentionBackend>& attention_backends() {
  using enum AttentionBackend;
  static const std::vector<AttentionBackend> all = {kAuto, kCudnn, kFlash3, kFlash, kEfficient, kMath};
  return all;
}

std::string_view name_of(AttentionBackend backend) {
  static constexpr std::string_view kNames[] = {"auto", "cudnn", "fa3", "flash", "efficient", "math"};
  return kNames[static_cast<std::size_t>(backend)];
}

std::optional<AttentionBackend> parse_attention(std::string_view name) {
  for (const AttentionBackend backend : attention_backends())
    if (name_of(backend) == name) return backend;
  return {};
}

bool has_aligned_rows(const at::Tensor& t) {
  bool even = t.stride(-1) == 1 && reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (std::int64_t axis = 0; axis + 1 < t.dim(); ++axis) even = even && t.stride(axis) * t.element_size() % 16 == 0;
  return even;
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, AttentionBackend backend) {
  const auto turned = [](const at::Tensor& t) {
    // LibTorch's kernels read 16 bytes at a time and do not check.
    const at::Tensor rows = t.is_cuda() && !has_aligned_rows(t) ? t.clone(at::MemoryFormat::Contiguous) : t;
    return (t.dim() > 4 ? rows.flatten(0, -4) : t.dim() < 4 ? rows.unsqueeze(0) : rows).transpose(1, 2);
  };
  return heads_first(turned(q), turned(k), turned(v), backend).transpose(1, 2).contiguous();
}

}  // namespace ditfleet::region
