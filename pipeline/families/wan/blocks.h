// The repeated block of Wan in eager mode, as a function of activations, parameters and tables.
//
// S is the number of tokens and D the width. There is one sample. Activations have the model's type (fp32 or bf16);
// norms, modulation and gated sums are computed in fp32 and rounded after each, as in diffusers.
#pragma once

#include "pipeline/families/wan/parameters.h"
#include "pipeline/parallel/sequence.h"

namespace ditfleet::pipeline {

// Returns the block's output for x [1, S, D] and text [1, S_text, D]. `time`: [1, 6, D] from time_proj. `sequence`: how
// ranks share the tokens, of which x and rope have this rank's; null: one rank.
at::Tensor wan_block(at::Tensor x, const at::Tensor& text, const at::Tensor& time, const at::Tensor& rope,
                     const TransformerBlock& block, const WanConfig& config,
                     const parallel::Sequence* sequence = nullptr);

// LayerNorm without parameters, then x · (1 + scale) + shift. shift and scale: [1, 1, D] fp32.
at::Tensor wan_modulated_norm(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale, double eps);

}  // namespace ditfleet::pipeline
