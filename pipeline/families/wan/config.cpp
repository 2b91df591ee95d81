#include "pipeline/families/wan/config.h"

namespace ditfleet::pipeline {
namespace {
constexpr std::int64_t kMost = 1 << 20;
}

WanConfig read_wan_config(const ConfigFile& file, bool expand_timesteps) {
  const std::string kind = file.text("_class_name", "WanTransformer3DModel");
  if (kind != "WanTransformer3DModel") file.refuse("_class_name is \"" + kind + "\"; it must be WanTransformer3DModel");
  if (file.integers("patch_size", {1, 2, 2}, 1, 64) != std::vector<std::int64_t>{1, 2, 2})
    file.refuse("patch_size must be [1, 2, 2]; other patches are not supported");
  WanConfig c{};
  c.in_channels = file.integer("in_channels", 16, 1, kMost);
  // diffusers takes in_channels for null, and 16 for a missing field.
  c.out_channels = file.integer("out_channels", file.fields().contains("out_channels") ? c.in_channels : 16, 1, kMost);
  c.num_layers = file.integer("num_layers", 40, 0, 10000);
  c.head_dim = file.integer("attention_head_dim", 128, 6, kMost);
  if (c.head_dim % 2 != 0) file.refuse("attention_head_dim is " + std::to_string(c.head_dim) + "; it must be even");
  c.heads = file.integer("num_attention_heads", 40, 1, kMost);
  c.text_dim = file.integer("text_dim", 4096, 1, kMost);
  c.freq_dim = file.integer("freq_dim", 256, 2, kMost);
  if (c.freq_dim % 2 != 0) file.refuse("freq_dim is " + std::to_string(c.freq_dim) + "; it must be even");
  c.image_dim = file.integer("image_dim", 0, 1, kMost);
  c.pos_embed_seq_len = file.integer("pos_embed_seq_len", 0, 1, kMost);
  if (c.pos_embed_seq_len > 0 && c.image_dim == 0) file.refuse("pos_embed_seq_len needs an image_dim");
  if (const std::int64_t added = file.integer("added_kv_proj_dim", 0, 1, kMost);
      added != (c.image_dim > 0 ? c.width() : 0))
    file.refuse("added_kv_proj_dim is " + std::to_string(added) + "; with image_dim it must be " +
                std::to_string(c.width()) + ", the width of all heads, and else null");
  c.ffn_dim = file.integer("ffn_dim", 13824, 1, kMost);
  c.cross_attn_norm = file.boolean("cross_attn_norm", true);
  c.eps = file.number("eps", 1e-6);
  c.rope_max_seq_len = file.integer("rope_max_seq_len", 1024, 1, kMost);
  c.expand_timesteps = expand_timesteps;
  return c;
}

}  // namespace ditfleet::pipeline
