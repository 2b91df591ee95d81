// The config.json of a Z-Image transformer (diffusers ZImageTransformer2DModel).
#pragma once

#include <array>
#include <cstdint>

#include "pipeline/nn/config_file.h"

namespace ditfleet::pipeline {

struct ZImageConfig {
  std::int64_t channels;  // of the latents
  std::int64_t width, heads, layers, refiner_layers;
  std::int64_t text_width;  // of a text token
  double norm_eps, rope_theta, time_scale;
  std::array<std::int64_t, 3> axes;     // channels of a head for caption position, row and column; even
  std::array<std::int64_t, 3> lengths;  // positions along each axis

  std::int64_t head_dim() const { return width / heads; }
  std::int64_t mlp_width() const { return static_cast<std::int64_t>(static_cast<double>(width) / 3 * 8); }
  std::int64_t time_width() const { return width < 256 ? width : 256; }
};

// Throws Failure (kDataCorrupt); the message contains file and field.
ZImageConfig read_z_image_config(const ConfigFile& file);

}  // namespace ditfleet::pipeline
