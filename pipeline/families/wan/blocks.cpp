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
                     const TransformerBlock& block, const WanConfig& c, const parallel::Sequence* sequence) {
  using L = WanBlockLinear;
  using T = WanBlockTensor;
  const auto linear = [&](std::size_t which, const at::Tensor& of) { return apply_linear(block.linears[which], of); };
  const auto& tensors = block.tensors;
  const std::vector<at::Tensor> m = (tensors[T::kTable] + time.to(kFp32)).chunk(6, 1);
  const std::vector<at::Tensor> qkv = linear(L::kQkv, wan_modulated_norm(x, m[0], m[1], c.eps)).chunk(3, 2);
  const at::Tensor attended =
      parallel::attend(apply_rope(norm_heads(qkv[0], tensors[T::kNormQ], c), rope),
                       apply_rope(norm_heads(qkv[1], tensors[T::kNormK], c), rope), heads_of(qkv[2], c), sequence);
  x = gated_sum(x, m[2], linear(L::kOut, attended));
  const at::Tensor normed = c.cross_attn_norm ? at::layer_norm(x.to(kFp32), {c.width()}, tensors[T::kNorm2Weight],
                                                               tensors[T::kNorm2Bias], c.eps)
                                                    .to(x.scalar_type())
                                              : x;
  const std::vector<at::Tensor> kv = linear(L::kCrossKv, text).chunk(2, 2);
  const at::Tensor crossed =
      parallel::attend(norm_heads(linear(L::kCrossQ, normed), tensors[T::kCrossNormQ], c),
                       norm_heads(kv[0], tensors[T::kCrossNormK], c), heads_of(kv[1], c), nullptr);
  x = x + linear(L::kCrossOut, crossed);
  const at::Tensor inner = at::gelu(linear(L::kMlpIn, wan_modulated_norm(x, m[3], m[4], c.eps)), "tanh");
  return gated_sum(x, m[5], linear(L::kMlpOut, inner));
}

}  // namespace ditfleet::pipeline
