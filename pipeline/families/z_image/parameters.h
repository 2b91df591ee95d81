// The parameters of a Z-Image transformer, and the program of its blocks.
#pragma once

#include "pipeline/families/z_image/config.h"
#include "pipeline/nn/transformer/weights.h"

namespace ditfleet::pipeline {

// Indices in TransformerWeights::linears.
struct ZImageLinear {
  enum : std::size_t { kImageIn, kTextIn, kTimeFirst, kTimeSecond, kFinalScale, kImageOut };
};
// Indices in TransformerWeights::tensors.
struct ZImageTensor {
  enum : std::size_t { kTextNorm, kImagePad, kTextPad };
};
// Indices in TransformerBlock::linears. The last one is width → 4 · width: scale and gate of attention, then of the
// MLP.
struct ZImageBlockLinear {
  enum : std::size_t { kQkv, kOut, kMlpIn, kMlpOut, kModulation };
};
// Indices in TransformerSpec::blocks.
struct ZImageBlocks {
  enum : std::size_t { kText, kImage, kJoint };
};

// The refiner of the caption runs apart, once for a request. Knows the names of the original code.
TransformerSpec z_image_spec(const ZImageConfig& config);

}  // namespace ditfleet::pipeline
