#include "pipeline/nn/vae/config.h"

namespace ditfleet::pipeline {
namespace {
constexpr std::int64_t kMost = 1 << 20;
}

VaeConfig read_vae_config(const ConfigFile& file) {
  const std::string kind = file.text("_class_name", "AutoencoderKL");
  if (kind != "AutoencoderKL") file.refuse("_class_name is \"" + kind + "\"; it must be AutoencoderKL");
  VaeConfig c{};
  c.latent_channels = file.integer("latent_channels", 4, 1, kMost);
  c.out_channels = file.integer("out_channels", 3, 1, kMost);
  if (c.out_channels != 3 && c.out_channels != 1)
    file.refuse("out_channels is " + std::to_string(c.out_channels) + "; it must be 3, or 1 for grey images");
  c.layers_per_block = file.integer("layers_per_block", 1, 0, 100);
  c.norm_num_groups = file.integer("norm_num_groups", 32, 1, kMost);
  c.block_out_channels = file.integers("block_out_channels", {64}, 1, kMost);
  if (c.block_out_channels.empty() || c.block_out_channels.size() > 8)
    file.refuse("block_out_channels has " + std::to_string(c.block_out_channels.size()) + " entries; use 1 to 8");
  for (auto channels : c.block_out_channels)
    if (channels % c.norm_num_groups != 0)
      file.refuse("block_out_channels contains " + std::to_string(channels) + ", which norm_num_groups (" +
                  std::to_string(c.norm_num_groups) + ") must divide");
  const auto up = file.texts("up_block_types", {"UpDecoderBlock2D"});
  if (up.size() != c.block_out_channels.size())
    file.refuse("up_block_types has " + std::to_string(up.size()) +
                " entries; it must have one for each of block_out_channels (" +
                std::to_string(c.block_out_channels.size()) + ")");
  for (const auto& type : up) {
    if (type != "UpDecoderBlock2D" && type != "AttnUpDecoderBlock2D")
      file.refuse("up_block_types contains \"" + type + "\"; use UpDecoderBlock2D or AttnUpDecoderBlock2D");
    c.up_block_attention.push_back(type == "AttnUpDecoderBlock2D");
  }
  // Null is false, as in Python.
  const auto true_unless_told = [&](const char* key) { return file.boolean(key, !file.fields().contains(key)); };
  c.mid_block_attention = true_unless_told("mid_block_add_attention");
  c.post_quant_conv = true_unless_told("use_post_quant_conv");
  c.scaling_factor = file.number("scaling_factor", 0.18215);
  if (c.scaling_factor == 0) file.refuse("scaling_factor is 0; latents are divided by it");
  c.shift_factor = file.number("shift_factor", 0);
  const std::string name = file.text("act_fn", "silu");
  c.activation = find_activation(name);
  if (!c.activation) file.refuse("act_fn is \"" + name + "\"; it must be one of " + known_activations());
  return c;
}

}  // namespace ditfleet::pipeline
