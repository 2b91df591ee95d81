// The config.json of a video VAE (diffusers AutoencoderKLWan, and AutoencoderKLQwenImage, which is the same for one
// frame).
#pragma once

#include "pipeline/nn/config_file.h"

namespace ditfleet::pipeline {

struct VideoVaeConfig {
  static constexpr std::int64_t kTemporalFactor = 4;  // frames per latent frame, except for the first one

  std::int64_t base_dim, decoder_base_dim, z_dim, num_res_blocks;
  std::int64_t patch_size;                        // the coders work on patches of patch_size × patch_size pixels
  bool is_residual;                               // levels have shortcuts; see VideoVaeCoder
  std::vector<std::int64_t> dim_mult;             // channels of a level / base_dim, from the video to the latents
  std::vector<bool> temporal_downsample;          // one less than levels; two are true
  std::vector<double> latents_mean, latents_std;  // [z_dim]

  std::int64_t patch_channels() const { return 3 * patch_size * patch_size; }
  // The number of pixels per latent pixel in each direction.
  std::int64_t spatial_factor() const { return patch_size << (dim_mult.size() - 1); }
};

// Throws Failure (kDataCorrupt); the message contains file and field.
VideoVaeConfig read_video_vae_config(const ConfigFile& file);

}  // namespace ditfleet::pipeline
