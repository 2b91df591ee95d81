#include "pipeline/families/flux/config.h"

namespace ditfleet::pipeline {
namespace {
constexpr std::int64_t kMost = 1 << 20;
}

FluxConfig read_flux_config(const ConfigFile& file) {
  const std::string kind = file.text("_class_name", "FluxTransformer2DModel");
  if (kind != "FluxTransformer2DModel")
    file.refuse("_class_name is \"" + kind + "\"; it must be FluxTransformer2DModel");
  FluxConfig c{};
  c.in_channels = file.integer("in_channels", 64, 4, kMost);
  const std::int64_t patch = file.integer("patch_size", 1, 1, 64);
  c.token_out = patch * patch * file.integer("out_channels", c.in_channels, 1, kMost);
  c.num_layers = file.integer("num_layers", 19, 0, 10000);
  c.num_single_layers = file.integer("num_single_layers", 38, 0, 10000);
  c.head_dim = file.integer("attention_head_dim", 128, 2, kMost);
  c.heads = file.integer("num_attention_heads", 24, 1, kMost);
  c.joint_attention_dim = file.integer("joint_attention_dim", 4096, 1, kMost);
  c.pooled_projection_dim = file.integer("pooled_projection_dim", 768, 1, kMost);
  c.guidance_embeds = file.boolean("guidance_embeds", false);
  const auto axes = file.integers("axes_dims_rope", {16, 56, 56}, 0, kMost);
  if (axes.size() < 3) file.refuse("axes_dims_rope has " + std::to_string(axes.size()) + " entries; it must have 3");
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    if (axes[i] % 2 != 0)
      file.refuse("axes_dims_rope has the odd number " + std::to_string(axes[i]) + "; each must be even");
    c.axes_dims_rope[i] = axes[i];
    sum += axes[i];
  }
  if (sum != c.head_dim)
    file.refuse("axes_dims_rope adds up to " + std::to_string(sum) + "; it must be attention_head_dim, " +
                std::to_string(c.head_dim));
  if (c.in_channels % 4 != 0)
    file.refuse("in_channels is " + std::to_string(c.in_channels) +
                "; it must be a multiple of 4 (2 × 2 latent pixels per token)");
  if (c.token_out != c.in_channels)
    file.refuse("patch_size² · out_channels is " + std::to_string(c.token_out) +
                "; for text to image it must be in_channels, " + std::to_string(c.in_channels));
  return c;
}

}  // namespace ditfleet::pipeline
