#include "pipeline/nn/video_vae/config.h"

#include <algorithm>

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kMost = 1 << 16;

// The defaults of AutoencoderKLWan.
const std::vector<double> kMean = {-0.7571, -0.7089, -0.9113, 0.1075,  -0.1745, 0.9653,  -0.1517, 1.5508,
                                   0.4134,  -0.0715, 0.5517,  -0.3632, -0.1922, -0.9497, 0.2503,  -0.2921};
const std::vector<double> kStd = {2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
                                  3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160};

void must_have(const ConfigFile& file, const char* field, std::size_t entries, std::size_t right, const char* why) {
  if (entries != right)
    file.refuse(std::string(field) + " has " + std::to_string(entries) + " entries; it must have " +
                std::to_string(right) + why);
}

void must_be(const ConfigFile& file, const char* field, std::int64_t fallback, std::int64_t right) {
  if (const std::int64_t value = file.integer(field, fallback, 1, kMost); value != right)
    file.refuse(std::string(field) + " is " + std::to_string(value) + "; it must be " + std::to_string(right));
}

// The VAE of TI2V-5B has the same class.
void refuse_residual(const ConfigFile& file, std::int64_t base_dim) {
  const auto refuse = [&](const char* what) {
    file.refuse(std::string(what) +
                ", as in the VAE of TI2V-5B, which is not supported; use the VAE of a 1.3B, 14B or A14B model");
  };
  if (file.boolean("is_residual", false)) refuse("is_residual is true");
  if (file.integer("patch_size", 1, 1, kMost) != 1) refuse("patch_size is larger than 1");
  if (file.integer("decoder_base_dim", base_dim, 1, kMost) != base_dim) refuse("decoder_base_dim is not base_dim");
}

}  // namespace

VideoVaeConfig read_video_vae_config(const ConfigFile& file) {
  const std::string kind = file.text("_class_name", "AutoencoderKLWan");
  if (kind != "AutoencoderKLWan") file.refuse("_class_name is \"" + kind + "\"; it must be AutoencoderKLWan");
  VideoVaeConfig c{};
  c.base_dim = file.integer("base_dim", 96, 2, kMost);
  refuse_residual(file, c.base_dim);
  c.z_dim = file.integer("z_dim", 16, 1, kMost);
  c.num_res_blocks = file.integer("num_res_blocks", 2, 1, 100);
  c.dim_mult = file.integers("dim_mult", {1, 2, 4, 4}, 1, kMost);
  if (c.dim_mult.size() < 3 || c.dim_mult.size() > 8)
    file.refuse("dim_mult has " + std::to_string(c.dim_mult.size()) + " entries; use 3 to 8");
  c.temporal_downsample = file.booleans("temperal_downsample", {false, true, true});
  must_have(file, "temperal_downsample", c.temporal_downsample.size(), c.dim_mult.size() - 1,
            ", one less than dim_mult");
  if (std::count(c.temporal_downsample.begin(), c.temporal_downsample.end(), true) != 2)
    file.refuse("temperal_downsample must contain true twice, for 4 frames per latent frame");
  must_be(file, "scale_factor_temporal", VideoVaeConfig::kTemporalFactor, VideoVaeConfig::kTemporalFactor);
  must_be(file, "scale_factor_spatial", 8, c.spatial_factor());
  must_be(file, "in_channels", 3, 3);
  must_be(file, "out_channels", 3, 3);
  // diffusers constructs such an encoder but cannot run it.
  if (!file.numbers("attn_scales", {}).empty()) file.refuse("attn_scales must be empty");
  c.latents_mean = file.numbers("latents_mean", kMean);
  c.latents_std = file.numbers("latents_std", kStd);
  const auto z_dim = static_cast<std::size_t>(c.z_dim);
  must_have(file, "latents_mean", c.latents_mean.size(), z_dim, ", as z_dim says");
  must_have(file, "latents_std", c.latents_std.size(), z_dim, ", as z_dim says");
  if (std::count(c.latents_std.begin(), c.latents_std.end(), 0.0) > 0)
    file.refuse("latents_std contains 0; latents are divided by it");
  return c;
}

}  // namespace ditfleet::pipeline
