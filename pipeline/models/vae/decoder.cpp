#include "pipeline/models/vae/decoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/upsample_nearest2d.h>

#include <array>

namespace ditfleet::pipeline {
namespace {

constexpr double kEps = 1e-6;

at::Tensor conv(const at::Tensor& x, const ConvSlot& slot) {
  const std::int64_t pad = slot.weight.size(2) / 2;  // kernels of 3 and 1 that keep the size
  return at::conv2d(x, slot.weight, slot.bias, /*stride=*/1, /*padding=*/pad);
}

at::Tensor linear(const at::Tensor& x, const LinearSlot& slot) { return at::linear(x, slot.weight, slot.bias); }

at::Tensor twice_as_large(const at::Tensor& x) {
  return at::upsample_nearest2d(x, c10::OptionalArrayRef<std::int64_t>(), std::array<double, 2>{2.0, 2.0});
}

}  // namespace

VaeDecoder::Resnet VaeDecoder::bind_resnet(Parameters& p, const std::string& prefix, std::int64_t in, std::int64_t out) {
  Resnet r{p.norm(prefix + ".norm1", in), p.norm(prefix + ".norm2", out), p.conv(prefix + ".conv1", in, out, 3),
           p.conv(prefix + ".conv2", out, out, 3), {}};
  if (in != out) r.shortcut = p.conv(prefix + ".conv_shortcut", in, out, 1);
  return r;
}

VaeDecoder::Attention VaeDecoder::bind_attention(Parameters& p, const std::string& prefix, std::int64_t channels) {
  // Folders of before 2023 use the second names.
  const bool old = !p.contains(prefix + ".to_q.weight") && p.contains(prefix + ".query.weight");
  const auto bind = [&](const char* name, const char* before) {
    return p.linear(prefix + "." + (old ? before : name), channels, channels);
  };
  return {p.norm(prefix + ".group_norm", channels), bind("to_q", "query"), bind("to_k", "key"), bind("to_v", "value"),
          bind("to_out.0", "proj_attn")};
}

VaeDecoder VaeDecoder::load(const std::string& dir, Placement placement) {
  VaeDecoder m;
  m.config_ = read_vae_config(ConfigFile(dir + "/config.json"));
  auto p = Parameters::open(dir, placement);
  const VaeConfig& c = m.config_;
  const std::int64_t deepest = c.block_out_channels.back();
  if (c.post_quant_conv) m.post_quant_ = p.conv("post_quant_conv", c.latent_channels, c.latent_channels, 1);
  m.in_ = p.conv("decoder.conv_in", c.latent_channels, deepest, 3);
  m.mid_first_ = bind_resnet(p, "decoder.mid_block.resnets.0", deepest, deepest);
  if (c.mid_block_attention) m.mid_attention_ = bind_attention(p, "decoder.mid_block.attentions.0", deepest);
  m.mid_second_ = bind_resnet(p, "decoder.mid_block.resnets.1", deepest, deepest);
  std::int64_t channels = deepest;
  const std::size_t blocks = c.block_out_channels.size();
  for (std::size_t i = 0; i < blocks; ++i) {
    const std::string at = "decoder.up_blocks." + std::to_string(i);
    const std::int64_t out = c.block_out_channels[blocks - 1 - i];
    UpBlock block;
    for (std::int64_t j = 0; j <= c.layers_per_block; ++j) {
      block.resnets.push_back(bind_resnet(p, at + ".resnets." + std::to_string(j), channels, out));
      if (c.up_block_attention[i]) block.attentions.push_back(bind_attention(p, at + ".attentions." + std::to_string(j), out));
      channels = out;
    }
    if (i + 1 < blocks) block.upsample = p.conv(at + ".upsamplers.0.conv", out, out, 3);
    m.up_.push_back(std::move(block));
  }
  m.norm_out_ = p.norm("decoder.conv_norm_out", channels);
  m.out_ = p.conv("decoder.conv_out", channels, c.out_channels, 3);
  m.bytes_ = p.bytes();
  return m;
}

at::Tensor VaeDecoder::norm(const at::Tensor& x, const NormSlot& slot) const {
  return at::group_norm(x, config_.norm_num_groups, slot.weight, slot.bias, kEps);
}

at::Tensor VaeDecoder::resnet(const at::Tensor& x, const Resnet& s) const {
  const at::Tensor hidden = conv(config_.activation(norm(x, s.norm1)), s.conv1);
  const at::Tensor branch = conv(config_.activation(norm(hidden, s.norm2)), s.conv2);
  return (s.shortcut ? conv(x, *s.shortcut) : x) + branch;
}

at::Tensor VaeDecoder::attention(const at::Tensor& x, const Attention& s) const {
  const std::int64_t channels = x.size(1);
  // [1, C, h, w] → tokens [1, h · w, C]; normalized per channel group, attended by one head.
  const at::Tensor tokens = norm(x.flatten(2), s.norm).transpose(1, 2);
  const auto head = [&](const LinearSlot& slot) { return linear(tokens, slot).view({1, -1, 1, channels}).transpose(1, 2); };
  const at::Tensor attended = at::scaled_dot_product_attention(head(s.q), head(s.k), head(s.v));
  const at::Tensor out = linear(attended.transpose(1, 2).reshape({1, -1, channels}), s.out);
  return out.transpose(1, 2).reshape(x.sizes()) + x;
}

at::Tensor VaeDecoder::decode(const at::Tensor& latents) const {
  at::Tensor x = latents / config_.scaling_factor + config_.shift_factor;
  if (post_quant_) x = conv(x, *post_quant_);
  x = resnet(conv(x, in_), mid_first_);
  if (mid_attention_) x = attention(x, *mid_attention_);
  x = resnet(x, mid_second_);
  for (const UpBlock& block : up_) {
    for (std::size_t i = 0; i < block.resnets.size(); ++i) {
      x = resnet(x, block.resnets[i]);
      if (!block.attentions.empty()) x = attention(x, block.attentions[i]);
    }
    if (block.upsample) x = conv(twice_as_large(x), *block.upsample);
  }
  return conv(at::silu(norm(x, norm_out_)), out_);
}

}  // namespace ditfleet::pipeline
