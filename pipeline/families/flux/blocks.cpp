#include "pipeline/families/flux/blocks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>

#include "pipeline/families/flux/rope.h"

namespace ditfleet::pipeline {
namespace {

constexpr double kEps = 1e-6;

// Query, key and value of some tokens, each [1, S, H, head_dim]; query and key normalized per head.
struct Heads {
  at::Tensor query, key, value;
};

Heads project(const at::Tensor& x, const LinearSlot& qkv, const at::Tensor& norm_q, const at::Tensor& norm_k,
              BlockGeometry g) {
  const at::Tensor all = apply_linear(qkv, x).view({1, x.size(1), 3, g.heads, g.head_dim});
  return {at::rms_norm(all.select(2, 0), {g.head_dim}, norm_q, kEps),
          at::rms_norm(all.select(2, 1), {g.head_dim}, norm_k, kEps), all.select(2, 2)};
}

// [1, S, H, head_dim] each → [1, S, D].
at::Tensor attend(const Heads& h, const at::Tensor& rope, const parallel::Sequence* sequence) {
  return parallel::attend(apply_rope(h.query, rope), apply_rope(h.key, rope), h.value, sequence);
}

at::Tensor mlp(const at::Tensor& x, const StreamSlots& s) {
  return apply_linear(s.mlp_out, at::gelu(apply_linear(s.mlp_in, x), "tanh"));
}

// x + gate · branch; the branch is the caller's to give away.
at::Tensor gated_residual(const at::Tensor& x, const at::Tensor& gate, at::Tensor branch) {
  return x + branch.mul_(gate);
}

}  // namespace

at::Tensor modulated_norm(const at::Tensor& x, const Modulation& m) {
  return at::layer_norm(x, {x.size(-1)}, {}, {}, kEps).mul_(m.scale).add_(m.shift);
}

void double_block(at::Tensor& image, at::Tensor& text, const DoubleBlockSlots& slots, const DoubleModulation& m,
                  const at::Tensor& rope, BlockGeometry g, const parallel::Sequence* sequence) {
  const Heads of_image =
      project(modulated_norm(image, m.image_attention), slots.image.qkv, slots.image.norm_q, slots.image.norm_k, g);
  const Heads of_text =
      project(modulated_norm(text, m.text_attention), slots.text.qkv, slots.text.norm_q, slots.text.norm_k, g);
  const at::Tensor attended =
      attend({at::cat({of_text.query, of_image.query}, 1), at::cat({of_text.key, of_image.key}, 1),
              at::cat({of_text.value, of_image.value}, 1)},
             rope, sequence);
  const std::int64_t text_tokens = text.size(1);
  image = gated_residual(image, m.image_attention.gate,
                         apply_linear(slots.image.out, attended.slice(1, text_tokens).contiguous()));
  image = gated_residual(image, m.image_mlp.gate, mlp(modulated_norm(image, m.image_mlp), slots.image));
  text = gated_residual(text, m.text_attention.gate,
                        apply_linear(slots.text.out, attended.slice(1, 0, text_tokens).contiguous()));
  text = gated_residual(text, m.text_mlp.gate, mlp(modulated_norm(text, m.text_mlp), slots.text));
}

void single_block(at::Tensor& tokens, const SingleBlockSlots& slots, const Modulation& m, const at::Tensor& rope,
                  BlockGeometry g, const parallel::Sequence* sequence) {
  const at::Tensor x = modulated_norm(tokens, m);
  const at::Tensor attended = attend(project(x, slots.qkv, slots.norm_q, slots.norm_k, g), rope, sequence);
  const at::Tensor inner = at::gelu(apply_linear(slots.mlp_in, x), "tanh");
  tokens = gated_residual(tokens, m.gate, apply_linear(slots.out, at::cat({attended, inner}, 2)));
}

}  // namespace ditfleet::pipeline
