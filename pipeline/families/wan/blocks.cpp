#include "pipeline/families/wan/blocks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>

#include "pipeline/families/wan/rope.h"

namespace ditfleet::pipeline {
namespace {

constexpr auto kFp32 = c10::ScalarType::Float;

// [1, S, D] → [1, S, H, head_dim]
at::Tensor heads_of(const at::Tensor& x, const WanConfig& c) { return x.unflatten(2, {c.heads, c.head_dim}); }

// RMSNorm over all heads together.
at::Tensor norm_heads(const at::Tensor& x, const at::Tensor& weight, const WanConfig& c) {
  return heads_of(at::rms_norm(x, {c.width()}, weight, c.eps), c);
}

at::Tensor gated_sum(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& branch) {
  return (x.to(kFp32) + branch * gate).to(x.scalar_type());
}

}  // namespace

at::Tensor wan_modulated_norm(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps) {
  return at::layer_norm(x.to(kFp32), {x.size(-1)}, {}, {}, eps).mul_(1 + scale).add_(shift).to(x.scalar_type());
}

at::Tensor wan_block(at::Tensor x, const at::Tensor& text, const at::Tensor& time, const at::Tensor& rope,
                     const WanBlockSlots& s, const WanConfig& c, const parallel::Sequence* sequence) {
  const std::vector<at::Tensor> m = (s.table + time.to(kFp32)).chunk(6, 1);
  const std::vector<at::Tensor> qkv = apply_linear(s.qkv, wan_modulated_norm(x, m[0], m[1], c.eps)).chunk(3, 2);
  const at::Tensor attended =
      parallel::attend(apply_wan_rope(norm_heads(qkv[0], s.norm_q, c), rope),
                       apply_wan_rope(norm_heads(qkv[1], s.norm_k, c), rope), heads_of(qkv[2], c), sequence);
  x = gated_sum(x, m[2], apply_linear(s.out, attended));
  const at::Tensor normed =
      c.cross_attn_norm
          ? at::layer_norm(x.to(kFp32), {c.width()}, s.norm2.weight, s.norm2.bias, c.eps).to(x.scalar_type())
          : x;
  const std::vector<at::Tensor> kv = apply_linear(s.cross_kv, text).chunk(2, 2);
  const at::Tensor crossed = parallel::attend(norm_heads(apply_linear(s.cross_q, normed), s.cross_norm_q, c),
                                              norm_heads(kv[0], s.cross_norm_k, c), heads_of(kv[1], c), nullptr);
  x = x + apply_linear(s.cross_out, crossed);
  const at::Tensor inner = at::gelu(apply_linear(s.mlp_in, wan_modulated_norm(x, m[3], m[4], c.eps)), "tanh");
  return gated_sum(x, m[5], apply_linear(s.mlp_out, inner));
}

}  // namespace ditfleet::pipeline
