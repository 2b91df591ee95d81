// The parameters of a Wan transformer.
#pragma once

#include "pipeline/families/wan/config.h"
#include "pipeline/nn/transformer/weights.h"

namespace ditfleet::pipeline {

// Indices in TransformerWeights::linears and ::tensors. The tensors and the linears of time are fp32 in every
// precision.
struct WanLinear {
  enum : std::size_t {
    kTimeFirst,
    kTimeSecond,
    kTimeProjection,
    kTextFirst,
    kTextSecond,
    kPatchOut,
    kImageFirst,
    kImageSecond
  };
};
struct WanTensor {  // the convolution of a patch (C, 1, 2, 2) has the placement's type; kTable: [1, 2, D], shift, scale
  // Of an image: the norms before and after the linears, in fp32, and positions.
  enum : std::size_t {
    kPatchWeight,
    kPatchBias,
    kTable,
    kImageWeight,
    kImageBias,
    kImageOutWeight,
    kImageOutBias,
    kImagePositions
  };
};
// Indices in TransformerBlock::tensors. D = width.
struct WanBlockTensor {  // kTable: [1, 6, D], shift, scale, gate of self-attention, then of the MLP
  enum : std::size_t { kNormQ, kNormK, kCrossNormQ, kCrossNormK, kTable };
};

TransformerSpec wan_spec(const WanConfig& config);

}  // namespace ditfleet::pipeline
