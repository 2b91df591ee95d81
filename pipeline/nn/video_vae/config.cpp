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

// A shortcut's mean is over as many values for each channel, and it repeats each channel as often.
void check_shortcuts(const ConfigFile& file, const VideoVaeConfig& c) {
  const auto check = [&](std::int64_t channels, std::int64_t pixels, std::int64_t divisor) {
    if (channels * pixels % divisor != 0)
      file.refuse("dim_mult does not fit is_residual: " + std::to_string(channels) + " channels of " +
                  std::to_string(pixels) + " pixels are not a multiple of " + std::to_string(divisor));
  };
  const std::size_t last = c.dim_mult.size() - 1;
  for (std::size_t i = 0; i <= last; ++i) {
    const std::int64_t pixels = i == last ? 1 : c.temporal_downsample[i] ? 8 : 4;
    check(c.base_dim * (i == 0 ? 1 : c.dim_mult[i - 1]), pixels, c.base_dim * c.dim_mult[i]);
    if (i < last)  // the decoder's first level keeps the channels
      check(c.decoder_base_dim * c.dim_mult[i + 1], pixels, c.decoder_base_dim * c.dim_mult[std::min(last, i + 2)]);
  }
}

}  // namespace

VideoVaeConfig read_video_vae_config(const ConfigFile& file) {
  const std::string kind = file.text("_class_name", "AutoencoderKLWan");
  if (kind != "AutoencoderKLWan" && kind != "AutoencoderKLQwenImage")
    file.refuse("_class_name is \"" + kind + "\"; it must be AutoencoderKLWan or AutoencoderKLQwenImage");
  VideoVaeConfig c{};
  c.base_dim = file.integer("base_dim", 96, 2, kMost);
  c.decoder_base_dim = file.integer("decoder_base_dim", c.base_dim, 2, kMost);
  c.patch_size = file.integer("patch_size", 1, 1, 16);
  c.is_residual = file.boolean("is_residual", false);
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
  if (kind == "AutoencoderKLWan") must_be(file, "scale_factor_spatial", 8, c.spatial_factor());
  must_be(file, kind == "AutoencoderKLWan" ? "in_channels" : "input_channels", 3, c.patch_channels());
  must_be(file, "out_channels", 3, c.patch_channels());
  // diffusers constructs such an encoder but cannot run it.
  if (!file.numbers("attn_scales", {}).empty()) file.refuse("attn_scales must be empty");
  c.latents_mean = file.numbers("latents_mean", kMean);
  c.latents_std = file.numbers("latents_std", kStd);
  const auto z_dim = static_cast<std::size_t>(c.z_dim);
  must_have(file, "latents_mean", c.latents_mean.size(), z_dim, ", as z_dim says");
  must_have(file, "latents_std", c.latents_std.size(), z_dim, ", as z_dim says");
  if (std::count(c.latents_std.begin(), c.latents_std.end(), 0.0) > 0)
    file.refuse("latents_std contains 0; latents are divided by it");
  if (c.is_residual) check_shortcuts(file, c);
  return c;
}

}  // namespace ditfleet::pipeline
