// The two repeated blocks of FLUX in eager mode, as functions of activations, parameters and tables. They are the
// reference for the compiled blocks.
//
// In the shapes, S is the number of tokens and D the width. There is one sample. All tensors are on one device and have
// one element type (fp32 or bf16), except the rope table, which is complex64.
#pragma once

#include "pipeline/families/flux/modulation.h"
#include "pipeline/parallel/sequence.h"

namespace ditfleet::pipeline {

struct BlockGeometry {
  std::int64_t heads, head_dim;
};

// `sequence`: how ranks share the tokens of both streams, of which the tensors have this rank's; null: one rank.

// Replaces image [1, S_image, D] and text [1, S_text, D] by the block's outputs. `rope` has S_text + S_image tokens,
// text first.
void double_block(at::Tensor& image, at::Tensor& text, const TransformerBlock& block,
                  const DoubleModulation& modulation, const at::Tensor& rope, BlockGeometry geometry,
                  const parallel::Sequence* sequence = nullptr);

// Replaces tokens [1, S_text + S_image, D], text first, by the block's output.
void single_block(at::Tensor& tokens, const TransformerBlock& block, const Modulation& modulation,
                  const at::Tensor& rope, BlockGeometry geometry, const parallel::Sequence* sequence = nullptr);

// LayerNorm without parameters (eps 1e-6), then x · scale + shift.
at::Tensor modulated_norm(const at::Tensor& x, const Modulation& modulation);

}  // namespace ditfleet::pipeline
