// The layers of text encoders, written in the region compiler's IR.
#pragma once

#include <cstdint>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {

// What the model fixes of a text encoder's layer.
struct TextLayerShape {
  std::int64_t width = 2, heads = 1, head_dim = 2, inner = 2;
  double eps = 1e-6;
  OpCode activation = OpCode::kGeluTanh;  // an op of one operand
  bool gated = false;                     // T5: the activated branch times another
  ElementType type = ElementType::kF32;
};

// A layer of T5's encoder. Symbols: batch, tokens. Activation hidden [batch, tokens, width]; table position_bias [1,
// heads, tokens, tokens]; parameters norm1, norm2 [width], q.weight, k.weight, v.weight, o.weight, wi.weight,
// wi_gate.weight (gated), wo.weight: nothing has a bias. Attention is not scaled. Output: hidden.
Result<Program> t5_layer(const TextLayerShape& shape);

// A layer of CLIP's text encoder, causal. Symbols: batch, tokens. Activation hidden [batch, tokens, width]; parameters
// norm1, norm2
// (.weight and .bias), q, k, v, out, fc1, fc2 (.weight and .bias). Output: hidden.
Result<Program> clip_layer(const TextLayerShape& shape);

}  // namespace ditfleet::region
