// The config.json of a Wan transformer (diffusers WanTransformer3DModel).
#pragma once

#include <array>
#include <cstdint>

#include "pipeline/nn/config_file.h"

namespace ditfleet::pipeline {

struct WanConfig {
  std::int64_t in_channels, out_channels;  // of a latent pixel; in_channels includes mask and condition
  std::int64_t num_layers;
  std::int64_t head_dim, heads;
  std::int64_t text_dim;           // width of a text token
  std::int64_t image_dim;          // width of CLIP's tokens of an image; 0: the model reads none
  std::int64_t pos_embed_seq_len;  // tokens of a first and a last image, which have positions; 0: they have none
  std::int64_t freq_dim;           // sinusoids of the timestep
  std::int64_t ffn_dim;
  bool cross_attn_norm;
  double eps;
  std::int64_t rope_max_seq_len;  // most tokens along an axis
  bool expand_timesteps;          // the first frame may have a timestep of its own, 0

  std::int64_t width() const { return head_dim * heads; }
  // The head's channels that rotate with frame, row and column; even, summing to head_dim.
  std::array<std::int64_t, 3> rope_axes() const {
    const std::int64_t side = 2 * (head_dim / 6);
    return {head_dim - 2 * side, side, side};
  }
};

// The VAE makes four frames of each latent frame but the first.
inline std::int64_t wan_frames(std::int64_t latent_frames) { return 4 * (latent_frames - 1) + 1; }
inline std::int64_t wan_latent_frames(std::int64_t frames) { return (frames - 1) / 4 + 1; }

// `expand_timesteps`: what model_index.json says. Throws Failure (kDataCorrupt); the message contains file and field.
WanConfig read_wan_config(const ConfigFile& file, bool expand_timesteps = false);
// Of a model_index.json.
inline bool expands_timesteps(const ConfigFile& index) { return index.boolean("expand_timesteps", false); }

}  // namespace ditfleet::pipeline
