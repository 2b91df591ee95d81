// The two repeated blocks of FLUX, each a function of activations, parameter slots and tables and of nothing
// else: what the region compiler takes over, with these functions as its reference (its "eager" backend).
//
// Shapes: S tokens, D = width, H heads of head_dim, one sample. Everything lives on one device in one element
// type (fp32 or bf16), but the rope table, which is complex64.
#pragma once

#include "pipeline/families/flux/modulation.h"

namespace ditfleet::pipeline {

struct BlockGeometry {
  std::int64_t heads, head_dim;
};

// image [1, S_image, D] and text [1, S_text, D] are replaced by the block's outputs. rope: S_text + S_image
// tokens, text first.
void double_block(at::Tensor& image, at::Tensor& text, const DoubleBlockSlots& slots,
                  const DoubleModulation& modulation, const at::Tensor& rope, BlockGeometry geometry);

// tokens [1, S_text + S_image, D], text first, is replaced by the block's output.
void single_block(at::Tensor& tokens, const SingleBlockSlots& slots, const Modulation& modulation,
                  const at::Tensor& rope, BlockGeometry geometry);

// LayerNorm without parameters (eps 1e-6), then x · scale + shift.
at::Tensor modulated_norm(const at::Tensor& x, const Modulation& modulation);

}  // namespace ditfleet::pipeline
