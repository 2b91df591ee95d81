// The parameters of a Wan transformer.
#pragma once

#include "pipeline/families/wan/config.h"
#include "pipeline/nn/transformer/weights.h"

namespace ditfleet::pipeline {

// Indices in TransformerWeights::linears and ::tensors. The tensors and the linears of time are fp32 in every
// precision.
struct WanLinear {
  enum : std::size_t { kTimeFirst, kTimeSecond, kTimeProjection, kTextFirst, kTextSecond, kPatchOut };
};
struct WanTensor {  // the convolution of a patch (C, 1, 2, 2) has the placement's type; kTable: [1, 2, D], shift, scale
  enum : std::size_t { kPatchWeight, kPatchBias, kTable };
};
// Indices in TransformerBlock::linears and ::tensors. D = width.
struct WanBlockLinear {
  enum : std::size_t { kQkv, kOut, kCrossQ, kCrossKv, kCrossOut, kMlpIn, kMlpOut };
};
struct WanBlockTensor {  // kTable: [1, 6, D], shift, scale, gate of self-attention, then of the MLP
  enum : std::size_t { kNormQ, kNormK, kCrossNormQ, kCrossNormK, kTable, kNorm2Weight, kNorm2Bias };
};

TransformerSpec wan_spec(const WanConfig& config);

}  // namespace ditfleet::pipeline
