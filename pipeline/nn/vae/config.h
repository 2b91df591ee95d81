// A VAE's config.json (diffusers AutoencoderKL, AutoencoderKLFlux2).
#pragma once

#include "pipeline/nn/config_file.h"
#include "pipeline/nn/text/activation.h"

namespace ditfleet::pipeline {

struct VaeConfig {
  std::int64_t latent_channels, out_channels, layers_per_block, norm_num_groups;
  // Of the decoder and of the encoder, from the image to the latents; at least one.
  std::vector<std::int64_t> block_out_channels, down_channels = {};
  std::vector<bool> up_block_attention, down_block_attention = {};  // whether each block has attention
  bool mid_block_attention, post_quant_conv, quant_conv = false;
  double scaling_factor, shift_factor;
  std::optional<double> batch_norm_eps;  // AutoencoderKLFlux2: the latents of 2 × 2 pixels are normalized
  Activation activation;

  // The number of pixels per latent pixel in each direction.
  std::int64_t factor() const { return std::int64_t{1} << (block_out_channels.size() - 1); }
};

// Throws Failure (kDataCorrupt); the message contains file and field.
VaeConfig read_vae_config(const ConfigFile& file);

}  // namespace ditfleet::pipeline
