#include "pipeline/families/flux2/config.h"

#include <filesystem>

#include "shared/families/flux2/flux2.h"

namespace ditfleet::pipeline {

Flux2Config read_flux2_config(const ConfigFile& file) {
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
  const std::string index =
      (std::filesystem::path(file.path()).parent_path().parent_path() / "model_index.json").string();
  c.cached_references =
      std::filesystem::exists(index) && families::caches_references(ConfigFile(index).text("_class_name", ""));
  c.guidance_embeds = file.boolean("guidance_embeds", true);
  const auto axes = file.integers("axes_dims_rope", {32, 32, 32, 32}, 0, kMost);
  if (axes.size() != 4) file.refuse("axes_dims_rope has " + std::to_string(axes.size()) + " entries; it must have 4");
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    if (axes[i] % 2 != 0)
      file.refuse("axes_dims_rope has the odd number " + std::to_string(axes[i]) + "; each must be even");
    sum += c.axes[i] = axes[i];
  }
  if (sum != c.head_dim)
    file.refuse("axes_dims_rope adds up to " + std::to_string(sum) + "; it must be attention_head_dim, " +
                std::to_string(c.head_dim));
  return c;
}

}  // namespace ditfleet::pipeline
