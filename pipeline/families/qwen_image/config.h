// The config.json of a Qwen-Image transformer (diffusers QwenImageTransformer2DModel).
#pragma once

#include <array>
#include <cstdint>

#include "pipeline/nn/config_file.h"

namespace ditfleet::pipeline {

struct QwenImageConfig {
  std::int64_t channels;  // of a packed latent token, in and out
  std::int64_t blocks;
  std::int64_t head_dim, heads;
  std::int64_t text_width;           // of a text token
  std::array<std::int64_t, 3> axes;  // channels of a head for picture, row and column; even
  bool zero_cond_t;                  // the tokens of pictures are modulated as at timestep 0

  std::int64_t width() const { return head_dim * heads; }
  std::int64_t mlp_width() const { return 4 * width(); }
};

// Throws Failure (kDataCorrupt); the message contains file and field.
QwenImageConfig read_qwen_image_config(const ConfigFile& file);

}  // namespace ditfleet::pipeline
