#include "pipeline/families/qwen_image/config.h"

namespace ditfleet::pipeline {

QwenImageConfig read_qwen_image_config(const ConfigFile& file) {
  constexpr std::int64_t kMost = 1 << 20;
  const std::string kind = file.text("_class_name", "QwenImageTransformer2DModel");
  if (kind != "QwenImageTransformer2DModel")
    file.refuse("_class_name is \"" + kind + "\"; it must be QwenImageTransformer2DModel");
  QwenImageConfig c{};
  c.channels = file.integer("in_channels", 64, 4, kMost);
  if (file.integer("patch_size", 2, 1, 64) != 2) file.refuse("patch_size must be 2");
  if (const auto out = file.integer("out_channels", 16, 1, kMost); 4 * out != c.channels)
    file.refuse("out_channels is " + std::to_string(out) + " and in_channels " + std::to_string(c.channels) +
                "; in_channels must be four times out_channels (2 × 2 latent pixels per token)");
  c.blocks = file.integer("num_layers", 60, 0, 10000);
  c.head_dim = file.integer("attention_head_dim", 128, 2, kMost);
  c.heads = file.integer("num_attention_heads", 24, 1, kMost);
  c.text_width = file.integer("joint_attention_dim", 3584, 1, kMost);
  c.zero_cond_t = file.boolean("zero_cond_t", false);
  for (const char* field : {"guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"})
    if (file.boolean(field, false)) file.refuse(std::string(field) + " is true, which is not supported");
  const auto axes = file.integers("axes_dims_rope", {16, 56, 56}, 0, kMost);
  if (axes.size() != 3) file.refuse("axes_dims_rope has " + std::to_string(axes.size()) + " entries; it must have 3");
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < 3; ++i) {
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
