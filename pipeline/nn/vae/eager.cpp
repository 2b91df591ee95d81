#include "pipeline/nn/vae/eager.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/upsample_nearest2d.h>

#include <array>

#include "pipeline/nn/vae/channels_last.h"

namespace ditfleet::pipeline {
namespace {

at::Tensor conv(const at::Tensor& x, const ConvSlot& slot) {
  const std::int64_t pad = slot.weight.size(2) / 2;  // kernels of 3 and 1 that keep the size
  return at::conv2d(x, slot.weight, slot.bias, /*stride=*/1, /*padding=*/pad);
}

at::Tensor twice_as_large(const at::Tensor& x) {
  return at::upsample_nearest2d(x, c10::OptionalArrayRef<std::int64_t>(), std::array<double, 2>{2.0, 2.0});
}

class EagerVae {
 public:
  explicit EagerVae(const VaeConfig& config) : config_(config) {}

  at::Tensor norm(const at::Tensor& x, const NormSlot& slot) const {
    return at::group_norm(x, config_.norm_num_groups, slot.weight, slot.bias, kVaeEps);
  }

  at::Tensor resnet(const at::Tensor& x, const VaeResnet& s) const {
    const at::Tensor hidden = conv(config_.activation(norm(x, s.norm1)), s.conv1);
    const at::Tensor branch = conv(config_.activation(norm(hidden, s.norm2)), s.conv2);
    return (s.shortcut ? conv(x, *s.shortcut) : x) + branch;
  }

  at::Tensor middle(at::Tensor x, const VaeSlots& slots) const {
    x = resnet(x, slots.mid_first);
    if (slots.mid_attention) x = attention(x, *slots.mid_attention);
    return resnet(x, slots.mid_second);
  }

  at::Tensor layers(at::Tensor x, const VaeBlock& block) const {
    for (std::size_t i = 0; i < block.resnets.size(); ++i) {
      x = resnet(x, block.resnets[i]);
      if (!block.attentions.empty()) x = attention(x, block.attentions[i]);
    }
    return x;
  }

  at::Tensor attention(const at::Tensor& x, const VaeAttention& s) const {
    const std::int64_t batch = x.size(0), channels = x.size(1);
    // [N, C, h, w] → tokens [N, h · w, C]; normalized per channel group, attended by one head.
    const at::Tensor tokens = norm(x.flatten(2), s.norm).transpose(1, 2);
    const auto head = [&](const LinearSlot& slot) {
      return apply_linear(slot, tokens).view({batch, -1, 1, channels}).transpose(1, 2);
    };
    const at::Tensor attended = at::scaled_dot_product_attention(head(s.q), head(s.k), head(s.v));
    const at::Tensor out = apply_linear(s.out, attended.transpose(1, 2).reshape({batch, -1, channels}));
    return out.transpose(1, 2).reshape(x.sizes()) + x;
  }

 private:
  const VaeConfig& config_;
};

}  // namespace

at::Tensor decode_eager(const VaeConfig& config, const VaeSlots& slots, at::Tensor x) {
  const EagerVae ops(config);
  if (slots.quant) x = conv(x, *slots.quant);
  x = ops.middle(conv(x, slots.in), slots);
  for (const VaeBlock& block : slots.blocks) {
    x = ops.layers(x, block);
    if (block.resample) x = conv(twice_as_large(x), *block.resample);
  }
  return conv(at::silu(ops.norm(x, slots.norm_out)), slots.out);
}

at::Tensor encode_eager(const VaeConfig& config, const VaeSlots& slots, at::Tensor x) {
  const EagerVae ops(config);
  x = conv(x, slots.in);
  for (const VaeBlock& block : slots.blocks) {
    x = ops.layers(x, block);
    if (block.resample) x = half_as_large(x, *block.resample);
  }
  x = conv(at::silu(ops.norm(ops.middle(x, slots), slots.norm_out)), slots.out);
  return slots.quant ? conv(x, *slots.quant) : x;
}

}  // namespace ditfleet::pipeline
