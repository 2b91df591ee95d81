// The parameters of a VAE's decoder, or of its encoder.
#pragma once

#include <optional>
#include <vector>

#include "pipeline/nn/parameters.h"

namespace ditfleet::pipeline {

struct VaeResnet {
  NormSlot norm1, norm2;
  ConvSlot conv1, conv2;
  std::optional<ConvSlot> shortcut;  // set if the number of channels changes
};

struct VaeAttention {  // one head as wide as the channels
  NormSlot norm;
  LinearSlot q, k, v, out;
};

struct VaeBlock {
  std::vector<VaeResnet> resnets;
  std::vector<VaeAttention> attentions;  // one after each resnet, or none
  std::optional<ConvSlot> resample;      // to twice or half the sides
};

struct VaeSlots {
  std::optional<ConvSlot> quant;  // at the latents
  ConvSlot in, out;
  VaeResnet mid_first, mid_second;
  std::optional<VaeAttention> mid_attention;
  std::vector<VaeBlock> blocks;
  NormSlot norm_out;
  at::Tensor mean, deviation;  // of VaeConfig::batch_norm_eps: [1, 4 · latent_channels, 1, 1]
};

// The eps of every group norm.
inline constexpr double kVaeEps = 1e-6;

}  // namespace ditfleet::pipeline
