// The parameters of a Qwen-Image transformer, and the program of its blocks.
#pragma once

#include "pipeline/families/qwen_image/config.h"
#include "pipeline/nn/transformer/weights.h"

namespace ditfleet::pipeline {

// Indices in TransformerWeights::linears.
struct QwenImageLinear {
  enum : std::size_t {
    kImageIn,
    kTextIn,
    kTimeFirst,
    kTimeSecond,
    kFinalModulation,  // D → 2·D: scale, shift
    kImageOut
  };
};
// Indices in TransformerBlock::linears. D → 6·D: shift, scale, gate of attention, then of the MLP.
struct QwenImageBlockLinear {
  enum : std::size_t { kImageModulation = 8, kTextModulation };
};

TransformerSpec qwen_image_spec(const QwenImageConfig& config);

}  // namespace ditfleet::pipeline
