#include "tests/parity/vae_slots.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>

#include <cmath>

namespace ditfleet::pipeline::testing {

VaeConfig flux_vae_config() {
  return {.latent_channels = 16,
          .out_channels = 3,
          .layers_per_block = 2,
          .norm_num_groups = 32,
          .block_out_channels = {128, 256, 512, 512},
          .up_block_attention = {false, false, false, false},
          .mid_block_attention = true,
          .post_quant_conv = false,
          .scaling_factor = 0.3611,
          .shift_factor = 0.1159,
          .activation = find_activation("silu")};
}

VaeSlots random_vae_slots(const VaeConfig& c, Placement placement, std::uint64_t seed) {
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  const auto normal = [&](at::IntArrayRef sizes, double mean, double deviation) {
    return (at::randn(sizes, generator) * deviation + mean)
        .to(c10::ScalarType::BFloat16)
        .to(placement.device, placement.dtype);
  };
  const auto conv = [&](std::int64_t in, std::int64_t out, std::int64_t kernel) {
    return ConvSlot{normal({out, in, kernel, kernel}, 0, 1 / std::sqrt(static_cast<double>(in * kernel * kernel))),
                    normal({out}, 0, 0.2)};
  };
  const auto linear = [&](std::int64_t width) {
    return LinearSlot{normal({width, width}, 0, 1 / std::sqrt(static_cast<double>(width))), normal({width}, 0, 0.2)};
  };
  const auto norm = [&](std::int64_t channels) {
    return NormSlot{normal({channels}, 1, 0.2), normal({channels}, 0, 0.2)};
  };
  const auto resnet = [&](std::int64_t in, std::int64_t out) {
    VaeResnet made{norm(in), norm(out), conv(in, out, 3), conv(out, out, 3), {}};
    if (in != out) made.shortcut = conv(in, out, 1);
    return made;
  };
  const auto attention = [&](std::int64_t width) {
    return VaeAttention{norm(width), linear(width), linear(width), linear(width), linear(width)};
  };
  const std::int64_t deepest = c.block_out_channels.back();
  VaeSlots made;
  if (c.post_quant_conv) made.quant = conv(c.latent_channels, c.latent_channels, 1);
  made.in = conv(c.latent_channels, deepest, 3);
  made.mid_first = resnet(deepest, deepest);
  if (c.mid_block_attention) made.mid_attention = attention(deepest);
  made.mid_second = resnet(deepest, deepest);
  std::int64_t channels = deepest;
  for (std::size_t i = 0; i < c.block_out_channels.size(); ++i) {
    const std::int64_t out = c.block_out_channels[c.block_out_channels.size() - 1 - i];
    VaeBlock block;
    for (std::int64_t j = 0; j <= c.layers_per_block; ++j) {
      block.resnets.push_back(resnet(channels, out));
      if (c.up_block_attention[i]) block.attentions.push_back(attention(out));
      channels = out;
    }
    if (i + 1 < c.block_out_channels.size()) block.resample = conv(out, out, 3);
    made.blocks.push_back(std::move(block));
  }
  made.norm_out = norm(channels);
  made.out = conv(channels, c.out_channels, 3);
  return made;
}

}  // namespace ditfleet::pipeline::testing
