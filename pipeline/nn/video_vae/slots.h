// The parameters of a video VAE as plain structs. Convolutions have weights [out, in, frames, k, k] or, within frames,
// [out, in, k, k]; norms have one factor per channel.
#pragma once

#include <optional>
#include <vector>

#include "pipeline/nn/parameters.h"

namespace ditfleet::pipeline {

struct VideoVaeResnet {
  at::Tensor norm1, norm2;  // [channels, 1, 1]
  ConvSlot conv1, conv2;
  std::optional<ConvSlot> shortcut;  // if the number of channels changes
};

struct VideoVaeAttention {
  at::Tensor norm;  // [channels, 1, 1]
  ConvSlot qkv, proj;
};

// Halves or doubles width and height.
struct VideoVaeResample {
  ConvSlot conv;
  std::optional<ConvSlot> time;  // if it also halves or doubles the number of frames
};

struct VideoVaeLevel {
  std::vector<VideoVaeResnet> resnets;
  std::optional<VideoVaeResample> resample;  // none in the last level
};

// The encoder runs its levels before the middle, the decoder after it.
struct VideoVaeCoder {
  ConvSlot in, out;
  VideoVaeResnet mid_first, mid_second;
  VideoVaeAttention mid_attention;
  std::vector<VideoVaeLevel> levels;  // in the order of execution
  at::Tensor norm_out;                // [channels, 1, 1]
  // Each level adds its input, brought to the level's size and channels. In the decoder, not the last level.
  bool residual = false;
};

struct VideoVaeSlots {
  VideoVaeCoder decoder;
  ConvSlot post_quant;
  std::optional<VideoVaeCoder> encoder;
  std::optional<ConvSlot> quant;  // with the encoder
};

}  // namespace ditfleet::pipeline
