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

// `norms`: of query and key.
Heads project(const at::Tensor& x, const LinearSlot& qkv, const at::Tensor* norms, BlockGeometry g) {
  const at::Tensor all = apply_linear(qkv, x).view({1, x.size(1), 3, g.heads, g.head_dim});
  return {at::rms_norm(all.select(2, 0), {g.head_dim}, norms[0], kEps),
          at::rms_norm(all.select(2, 1), {g.head_dim}, norms[1], kEps), all.select(2, 2)};
}

// [1, S, H, head_dim] each → [1, S, D].
at::Tensor attend(const Heads& h, const at::Tensor& rope, const parallel::Sequence* sequence) {
  return parallel::attend(apply_rope(h.query, rope), apply_rope(h.key, rope), h.value, sequence);
}

// One of the two streams of a double block.
struct Stream {
  const LinearSlot* linears;
  const at::Tensor* norms;

  const LinearSlot& operator[](std::size_t linear) const { return linears[linear]; }
};
Stream image_of(const TransformerBlock& b) { return {b.linears.data(), b.tensors.data()}; }
Stream text_of(const TransformerBlock& b) {
  return {b.linears.data() + FluxStreamLinear::kCount, b.tensors.data() + 2};
}

at::Tensor mlp(const at::Tensor& x, const Stream& s) {
  return apply_linear(s[FluxStreamLinear::kMlpOut], at::gelu(apply_linear(s[FluxStreamLinear::kMlpIn], x), "tanh"));
}

// x + gate · branch; the branch is the caller's to give away.
at::Tensor gated_residual(const at::Tensor& x, const at::Tensor& gate, at::Tensor branch) {
  return x + branch.mul_(gate);
}

}  // namespace

at::Tensor modulated_norm(const at::Tensor& x, const Modulation& m) {
  return at::layer_norm(x, {x.size(-1)}, {}, {}, kEps).mul_(m.scale).add_(m.shift);
}

void double_block(at::Tensor& image, at::Tensor& text, const TransformerBlock& block, const DoubleModulation& m,
                  const at::Tensor& rope, BlockGeometry g, const parallel::Sequence* sequence) {
  const Stream i = image_of(block), t = text_of(block);
  const Heads of_image = project(modulated_norm(image, m.image_attention), i[FluxStreamLinear::kQkv], i.norms, g);
  const Heads of_text = project(modulated_norm(text, m.text_attention), t[FluxStreamLinear::kQkv], t.norms, g);
  const at::Tensor attended =
      attend({at::cat({of_text.query, of_image.query}, 1), at::cat({of_text.key, of_image.key}, 1),
              at::cat({of_text.value, of_image.value}, 1)},
             rope, sequence);
  const std::int64_t text_tokens = text.size(1);
  image = gated_residual(image, m.image_attention.gate,
                         apply_linear(i[FluxStreamLinear::kOut], attended.slice(1, text_tokens).contiguous()));
  image = gated_residual(image, m.image_mlp.gate, mlp(modulated_norm(image, m.image_mlp), i));
  text = gated_residual(text, m.text_attention.gate,
                        apply_linear(t[FluxStreamLinear::kOut], attended.slice(1, 0, text_tokens).contiguous()));
  text = gated_residual(text, m.text_mlp.gate, mlp(modulated_norm(text, m.text_mlp), t));
}

void single_block(at::Tensor& tokens, const TransformerBlock& block, const Modulation& m, const at::Tensor& rope,
                  BlockGeometry g, const parallel::Sequence* sequence) {
  const auto& linears = block.linears;
  const at::Tensor x = modulated_norm(tokens, m);
  const at::Tensor attended =
      attend(project(x, linears[FluxSingleLinear::kQkv], block.tensors.data(), g), rope, sequence);
  const at::Tensor inner = at::gelu(apply_linear(linears[FluxSingleLinear::kMlpIn], x), "tanh");
  tokens = gated_residual(tokens, m.gate, apply_linear(linears[FluxSingleLinear::kOut], at::cat({attended, inner}, 2)));
}

}  // namespace ditfleet::pipeline
