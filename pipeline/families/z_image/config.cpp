#include "pipeline/families/z_image/config.h"

#include <algorithm>

namespace ditfleet::pipeline {

ZImageConfig read_z_image_config(const ConfigFile& file) {
  constexpr std::int64_t kMost = 1 << 20;
  const std::string kind = file.text("_class_name", "ZImageTransformer2DModel");
  if (kind != "ZImageTransformer2DModel")
    file.refuse("_class_name is \"" + kind + "\"; it must be ZImageTransformer2DModel");
  if (file.has("siglip_feat_dim"))
    file.refuse("siglip_feat_dim is set (Z-Image-Omni), which is not supported; set it to null");
  if (!file.boolean("qk_norm", true)) file.refuse("qk_norm is false, which is not supported; set it to true");
  const auto has = [&](const char* key, std::int64_t value) {
    const auto all = file.integers(key, {value}, 1, kMost);
    if (std::find(all.begin(), all.end(), value) == all.end())
      file.refuse(std::string(key) + " must contain " + std::to_string(value));
  };
  has("all_patch_size", 2);
  has("all_f_patch_size", 1);
  ZImageConfig c{};
  c.channels = file.integer("in_channels", 16, 1, kMost);
  c.width = file.integer("dim", 3840, 2, kMost);
  c.heads = file.integer("n_heads", 30, 1, kMost);
  c.layers = file.integer("n_layers", 30, 0, 10000);
  c.refiner_layers = file.integer("n_refiner_layers", 2, 0, 10000);
  c.text_width = file.integer("cap_feat_dim", 2560, 1, kMost);
  c.norm_eps = file.number("norm_eps", 1e-5);
  c.rope_theta = file.number("rope_theta", 256);
  c.time_scale = file.number("t_scale", 1000);
  const auto axes = file.integers("axes_dims", {32, 48, 48}, 2, kMost),
             lengths = file.integers("axes_lens", {1024, 512, 512}, 1, kMost);
  if (axes.size() != 3 || lengths.size() != 3) file.refuse("axes_dims and axes_lens must have 3 entries");
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    if (axes[i] % 2 != 0)
      file.refuse("axes_dims has the odd number " + std::to_string(axes[i]) + "; each must be even");
    sum += c.axes[i] = axes[i];
    c.lengths[i] = lengths[i];
  }
  if (c.width % c.heads != 0 || sum != c.head_dim())
    file.refuse("axes_dims adds up to " + std::to_string(sum) + "; it must be dim / n_heads, " +
                std::to_string(c.width) + " / " + std::to_string(c.heads));
  return c;
}

}  // namespace ditfleet::pipeline
