#include "pipeline/families/qwen_image/config.h"

#include <algorithm>

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
  std::ranges::copy(file.rope_axes({16, 56, 56}, c.head_dim), c.axes.begin());
  return c;
}

}  // namespace ditfleet::pipeline
