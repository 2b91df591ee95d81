// The config.json of a FLUX.2 transformer (diffusers Flux2Transformer2DModel).
#pragma once

#include <array>
#include <cstdint>

#include "pipeline/nn/config_file.h"

namespace ditfleet::pipeline {

struct Flux2Config {
  std::int64_t channels;  // of a packed latent token, in and out
  std::int64_t double_blocks, single_blocks;
  std::int64_t head_dim, heads;
  std::int64_t text_width;  // of a text token
  std::int64_t time_channels;
  double mlp_ratio, rope_theta, eps;
  bool cached_references;            // Flux2KleinKVPipeline: see Flux2Transformer::references()
  bool guidance_embeds;              // the file has weights for it, which no pipeline of this family uses
  std::array<std::int64_t, 4> axes;  // channels of a head for time, row, column and text position; even

  std::int64_t width() const { return head_dim * heads; }
  std::int64_t mlp_width() const { return static_cast<std::int64_t>(static_cast<double>(width()) * mlp_ratio); }
};

// `index`: model_index.json, which names the pipeline. Throws Failure (kDataCorrupt); the message contains file and
// field.
Flux2Config read_flux2_config(const ConfigFile& file, const ConfigFile& index);

}  // namespace ditfleet::pipeline
