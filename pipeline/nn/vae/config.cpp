#include "pipeline/nn/vae/config.h"

namespace ditfleet::pipeline {
namespace {
constexpr std::int64_t kMost = 1 << 20;
const std::vector<std::int64_t> kFlux2Channels{128, 256, 512, 512};  // the defaults of diffusers
}  // namespace

VaeConfig read_vae_config(const ConfigFile& file) {
  const std::string kind = file.text("_class_name", "AutoencoderKL");
  const bool batch_normed = kind == "AutoencoderKLFlux2";
  if (kind != "AutoencoderKL" && !batch_normed)
    file.refuse("_class_name is \"" + kind + "\"; it must be AutoencoderKL or AutoencoderKLFlux2");
  VaeConfig c{};
  c.latent_channels = file.integer("latent_channels", batch_normed ? 32 : 4, 1, kMost);
  c.out_channels = file.integer("out_channels", 3, 1, kMost);
  if (c.out_channels != 3 && c.out_channels != 1)
    file.refuse("out_channels is " + std::to_string(c.out_channels) + "; it must be 3, or 1 for grey images");
  c.layers_per_block = file.integer("layers_per_block", batch_normed ? 2 : 1, 0, 100);
  c.norm_num_groups = file.integer("norm_num_groups", 32, 1, kMost);
  c.block_out_channels =
      file.integers("block_out_channels", batch_normed ? kFlux2Channels : std::vector<std::int64_t>{64}, 1, kMost);
  c.down_channels = c.block_out_channels;
  if (batch_normed) {
    if (file.integers("patch_size", {2, 2}, 1, kMost) != std::vector<std::int64_t>{2, 2})
      file.refuse("patch_size must be [2, 2]");
    c.batch_norm_eps = file.number("batch_norm_eps", 1e-4);
    const std::size_t blocks = c.block_out_channels.size();
    c.block_out_channels = file.integers("decoder_block_out_channels", c.block_out_channels, 1, kMost);
    if (c.block_out_channels.size() != blocks)
      file.refuse("decoder_block_out_channels must have " + std::to_string(blocks) + " entries, as block_out_channels");
  }
  if (c.block_out_channels.empty() || c.block_out_channels.size() > 8)
    file.refuse("block_out_channels has " + std::to_string(c.block_out_channels.size()) + " entries; use 1 to 8");
  for (const auto& widths : {c.block_out_channels, c.down_channels})
    for (auto channels : widths)
      if (channels % c.norm_num_groups != 0)
        file.refuse("block_out_channels contains " + std::to_string(channels) + ", which norm_num_groups (" +
                    std::to_string(c.norm_num_groups) + ") must divide");
  const auto attention = [&](const char* key, const std::string& plain) {
    std::vector<bool> made;
    const auto types = file.texts(key, std::vector<std::string>(batch_normed ? 4 : 1, plain));
    if (types.size() != c.block_out_channels.size())
      file.refuse(key + (" has " + std::to_string(types.size())) +
                  " entries; it must have one for each of block_out_channels (" +
                  std::to_string(c.block_out_channels.size()) + ")");
    for (const auto& type : types) {
      if (type != plain && type != "Attn" + plain)
        file.refuse(key + (" contains \"" + type) + "\"; use " + plain + " or Attn" + plain);
      made.push_back(type != plain);
    }
    return made;
  };
  c.up_block_attention = attention("up_block_types", "UpDecoderBlock2D");
  c.down_block_attention = attention("down_block_types", "DownEncoderBlock2D");
  // Null is false, as in Python.
  const auto true_unless_told = [&](const char* key) { return file.boolean(key, !file.fields().contains(key)); };
  c.mid_block_attention = true_unless_told("mid_block_add_attention");
  c.post_quant_conv = true_unless_told("use_post_quant_conv");
  c.quant_conv = true_unless_told("use_quant_conv");
  c.scaling_factor = batch_normed ? 1 : file.number("scaling_factor", 0.18215);
  if (c.scaling_factor == 0) file.refuse("scaling_factor is 0; latents are divided by it");
  c.shift_factor = batch_normed ? 0 : file.number("shift_factor", 0);
  c.activation = read_activation(file, "act_fn", "silu");
  return c;
}

}  // namespace ditfleet::pipeline
