// The parameters of a FLUX transformer.
#pragma once

#include "pipeline/families/flux/config.h"
#include "pipeline/nn/transformer/weights.h"

namespace ditfleet::pipeline {

// Indices in TransformerWeights::linears. An embedder is two linears with SiLU between.
struct FluxLinear {
  enum : std::size_t { kImageIn, kTextIn, kTime, kPooled = 4, kFinalModulation = 6, kImageOut, kGuidance };
};
// Indices in TransformerBlock::linears. D = width.
struct FluxStreamLinear {  // of the image's stream, then of the text's, each with norm_q and norm_k
  enum : std::size_t { kQkv, kOut, kMlpIn, kMlpOut, kCount };
};
struct FluxDoubleLinear {  // D → 6·D: shift, scale, gate of attention, then of the MLP
  enum : std::size_t { kImageModulation = 2 * FluxStreamLinear::kCount, kTextModulation };
};
struct FluxSingleLinear {  // kOut: 5·D → D: attention's output, then the MLP's; kModulation: D → 3·D
  enum : std::size_t { kQkv, kMlpIn, kOut, kModulation };
};

// The first num_layers blocks are double blocks. The columns for adapters precede the weight in the single blocks'
// mlp_in: mlp_in and qkv have the same input. Knows the names of BFL's original code.
TransformerSpec flux_spec(const FluxConfig& config);

}  // namespace ditfleet::pipeline
