#include "pipeline/families/flux2/config.h"

#include <algorithm>

#include "shared/families/flux2/flux2.h"

namespace ditfleet::pipeline {

Flux2Config read_flux2_config(const ConfigFile& file, const ConfigFile& index) {
  constexpr std::int64_t kMost = 1 << 20;
  const std::string kind = file.text("_class_name", "Flux2Transformer2DModel");
  if (kind != "Flux2Transformer2DModel")
    file.refuse("_class_name is \"" + kind + "\"; it must be Flux2Transformer2DModel");
  Flux2Config c{};
  c.channels = file.integer("in_channels", 128, 4, kMost);
  if (file.integer("patch_size", 1, 1, 64) != 1) file.refuse("patch_size must be 1");
  if (const auto out = file.integer("out_channels", c.channels, 1, kMost); out != c.channels || out % 4 != 0)
    file.refuse("out_channels is " + std::to_string(out) + " and in_channels " + std::to_string(c.channels) +
                "; they must be equal, and a multiple of 4 (2 × 2 latent pixels per token)");
  c.double_blocks = file.integer("num_layers", 8, 0, 10000);
  c.single_blocks = file.integer("num_single_layers", 48, 0, 10000);
  c.head_dim = file.integer("attention_head_dim", 128, 2, kMost);
  c.heads = file.integer("num_attention_heads", 48, 1, kMost);
  c.text_width = file.integer("joint_attention_dim", 15360, 1, kMost);
  c.time_channels = file.integer("timestep_guidance_channels", 256, 2, kMost);
  c.mlp_ratio = file.number("mlp_ratio", 3);
  c.rope_theta = file.number("rope_theta", 2000);
  c.eps = file.number("eps", 1e-6);
  c.cached_references = families::caches_references(index.text("_class_name", ""));
  c.guidance_embeds = file.boolean("guidance_embeds", true);
  std::ranges::copy(file.rope_axes({32, 32, 32, 32}, c.head_dim), c.axes.begin());
  return c;
}

}  // namespace ditfleet::pipeline
