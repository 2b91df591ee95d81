// The config.json of a FLUX transformer (diffusers FluxTransformer2DModel).
#pragma once

#include <array>
#include <cstdint>

#include "pipeline/nn/config_file.h"

namespace ditfleet::pipeline {

struct FluxConfig {
  std::int64_t in_channels;  // of a packed latent token
  std::int64_t token_out;    // patch_size² · out_channels: width of a predicted token
  std::int64_t num_layers;   // double-stream blocks
  std::int64_t num_single_layers;
  std::int64_t head_dim, heads;
  std::int64_t joint_attention_dim;  // width of a text token
  std::int64_t pooled_projection_dim;
  bool guidance_embeds;
  std::array<std::int64_t, 3> axes_dims_rope;  // even, summing to head_dim

  std::int64_t width() const { return head_dim * heads; }
  std::int64_t mlp_width() const { return 4 * width(); }
};

// Throws Failure (kDataCorrupt); the message contains file and field.
FluxConfig read_flux_config(const ConfigFile& file);

}  // namespace ditfleet::pipeline
