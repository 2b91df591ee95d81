#include "pipeline/nn/vae/channels_last.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <optional>
#include <utility>

namespace ditfleet::pipeline {
namespace {

using region::ChannelsLast;

at::Tensor in_layout(const at::Tensor& x) { return x.contiguous(c10::MemoryFormat::ChannelsLast); }

// Without the slot's bias: LibTorch would add it in a pass of its own.
at::Tensor product(const at::Tensor& x, const ConvSlot& slot) {
  return in_layout(at::conv2d(x, slot.weight, {}, /*stride=*/1, /*padding=*/slot.weight.size(2) / 2));
}
at::Tensor conv(const at::Tensor& x, const ConvSlot& slot) {
  return in_layout(at::conv2d(x, slot.weight, slot.bias, /*stride=*/1, /*padding=*/slot.weight.size(2) / 2));
}

class Coding {
 public:
  Coding(const VaeConfig& config, const ChannelsLast& programs, at::Tensor x)
      : config_(config), programs_(programs), x_(std::move(x)) {}

  void convolve(const ConvSlot& slot) { set(conv(x_, slot)); }

  void resnet(const VaeResnet& s) {
    const at::Tensor hidden = product(activated(normalized(s.norm1, silu_)), s.conv1);
    const at::Tensor inner = programs_.normalize(hidden, programs_.sums(hidden, s.conv1.bias), s.conv1.bias,
                                                 norm(s.norm2), silu_, /*in_place=*/true);
    at::Tensor branch = product(activated(inner), s.conv2);
    const at::Tensor base = s.shortcut ? product(x_, *s.shortcut) : x_;
    add(base, std::move(branch), s.conv2.bias, s.shortcut ? s.shortcut->bias : at::Tensor());
  }

  void middle(const VaeSlots& slots) {
    resnet(slots.mid_first);
    if (slots.mid_attention) attention(*slots.mid_attention);
    resnet(slots.mid_second);
  }

  void layers(const VaeBlock& block) {
    for (std::size_t i = 0; i < block.resnets.size(); ++i) {
      resnet(block.resnets[i]);
      if (!block.attentions.empty()) attention(block.attentions[i]);
    }
  }

  void attention(const VaeAttention& s) {
    const std::int64_t batch = x_.size(0), channels = x_.size(1);
    // In this layout a picture is its tokens: [N, h · w, C].
    const at::Tensor tokens = normalized(s.norm, false).permute({0, 2, 3, 1}).view({batch, -1, channels});
    const auto head = [&](const LinearSlot& slot) {
      return apply_linear(slot, tokens).view({batch, -1, 1, channels}).transpose(1, 2);
    };
    const at::Tensor attended = at::scaled_dot_product_attention(head(s.q), head(s.k), head(s.v));
    LinearSlot out = s.out;
    const at::Tensor bias = std::exchange(out.bias, at::Tensor());
    const at::Tensor branch = apply_linear(out, attended.transpose(1, 2).reshape({batch, -1, channels}));
    add(x_, branch.view({batch, x_.size(2), x_.size(3), channels}).permute({0, 3, 1, 2}), bias, {});
  }

  void upsample(const ConvSlot& slot) { set(conv(programs_.upsample(x_), slot)); }
  void downsample(const ConvSlot& slot) { set(in_layout(half_as_large(x_, slot))); }

  at::Tensor finish(const NormSlot& norm_out, const ConvSlot& out) { return conv(normalized(norm_out, true), out); }

 private:
  // What SiLU, which the norm's program computes, is not.
  at::Tensor activated(const at::Tensor& x) const { return silu_ ? x : config_.activation(x); }

  ChannelsLast::GroupNorm norm(const NormSlot& slot) const {
    return {slot.weight, slot.bias, config_.norm_num_groups, kVaeEps};
  }

  at::Tensor normalized(const NormSlot& slot, bool silu) {
    if (!sums_) sums_ = programs_.sums(x_);
    return programs_.normalize(x_, *sums_, {}, norm(slot), silu, /*in_place=*/false);
  }

  void set(at::Tensor x) {
    x_ = std::move(x);
    sums_.reset();
  }

  void add(const at::Tensor& base, at::Tensor branch, const at::Tensor& bias, const at::Tensor& bias_2) {
    sums_ = programs_.add(base, branch, bias, bias_2);
    x_ = std::move(branch);
  }

  const VaeConfig& config_;
  const ChannelsLast& programs_;
  const bool silu_ = config_.activation == find_activation("silu");
  at::Tensor x_;
  std::optional<ChannelsLast::Sums> sums_;  // x_'s, where whoever made it has added them up
};

}  // namespace

void to_channels_last(VaeSlots& slots) {
  const auto change = [](ConvSlot& slot) { slot.weight = in_layout(slot.weight); };
  const auto change_resnet = [&](VaeResnet& resnet) {
    change(resnet.conv1);
    change(resnet.conv2);
    if (resnet.shortcut) change(*resnet.shortcut);
  };
  if (slots.quant) change(*slots.quant);
  change(slots.in);
  change(slots.out);
  change_resnet(slots.mid_first);
  change_resnet(slots.mid_second);
  for (VaeBlock& block : slots.blocks) {
    for (VaeResnet& resnet : block.resnets) change_resnet(resnet);
    if (block.resample) change(*block.resample);
  }
}

at::Tensor decode_channels_last(const VaeConfig& config, const VaeSlots& slots, const ChannelsLast& programs,
                                const at::Tensor& latents) {
  Coding x(config, programs, in_layout(latents));
  if (slots.quant) x.convolve(*slots.quant);
  x.convolve(slots.in);
  x.middle(slots);
  for (const VaeBlock& block : slots.blocks) {
    x.layers(block);
    if (block.resample) x.upsample(*block.resample);
  }
  return x.finish(slots.norm_out, slots.out);
}

at::Tensor encode_channels_last(const VaeConfig& config, const VaeSlots& slots, const ChannelsLast& programs,
                                const at::Tensor& pixels) {
  Coding x(config, programs, in_layout(pixels));
  x.convolve(slots.in);
  for (const VaeBlock& block : slots.blocks) {
    x.layers(block);
    if (block.resample) x.downsample(*block.resample);
  }
  x.middle(slots);
  const at::Tensor moments = x.finish(slots.norm_out, slots.out);
  return slots.quant ? conv(moments, *slots.quant) : moments;
}

at::Tensor half_as_large(const at::Tensor& x, const ConvSlot& slot) {
  return at::conv2d(at::constant_pad_nd(x, {0, 1, 0, 1}), slot.weight, slot.bias, /*stride=*/2);
}

}  // namespace ditfleet::pipeline
