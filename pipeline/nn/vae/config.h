// What a VAE's config.json says of its decoder (diffusers AutoencoderKL).
#pragma once

#include "pipeline/nn/config_file.h"
#include "pipeline/nn/text/activation.h"

namespace ditfleet::pipeline {

struct VaeConfig {
  std::int64_t latent_channels, out_channels, layers_per_block, norm_num_groups;
  std::vector<std::int64_t> block_out_channels;  // from the picture's side; at least one
  std::vector<bool> up_block_attention;          // of each up block: has it attention?
  bool mid_block_attention, post_quant_conv;
  double scaling_factor, shift_factor;
  Activation activation;

  // Pixels a latent pixel covers in each direction.
  std::int64_t factor() const { return std::int64_t{1} << (block_out_channels.size() - 1); }
};

// Throws Failure (kDataCorrupt) naming the file and the field.
VaeConfig read_vae_config(const ConfigFile& file);

}  // namespace ditfleet::pipeline
