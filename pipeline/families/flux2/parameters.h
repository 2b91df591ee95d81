// The parameters of a FLUX.2 transformer, and the programs of its blocks.
#pragma once

#include "pipeline/families/flux2/config.h"
#include "pipeline/nn/transformer/weights.h"

namespace ditfleet::pipeline {

// Indices in TransformerWeights::linears.
struct Flux2Linear {
  enum : std::size_t {
    kImageIn,
    kTextIn,
    kTimeFirst,
    kTimeSecond,
    kImageModulation,  // of all double blocks, D → 6·D: shift, scale, gate of attention, then of the MLP
    kTextModulation,
    kSingleModulation,  // of all single blocks, D → 3·D
    kFinalModulation,   // D → 2·D: scale, shift
    kImageOut
  };
};
// Indices in TransformerSpec::blocks.
struct Flux2Blocks {
  enum : std::size_t { kDouble, kSingle };
};

// Knows the names of BFL's original code.
TransformerSpec flux2_spec(const Flux2Config& config);

}  // namespace ditfleet::pipeline
