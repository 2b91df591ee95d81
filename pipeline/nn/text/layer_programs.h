// The layers of text encoders, written in the region compiler's IR.
#pragma once

#include <cstdint>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {

// The sizes and settings of a layer that its model fixes.
struct TextLayerShape {
  std::int64_t width = 2, heads = 1, head_dim = 2, inner = 2;
  double eps = 1e-6;
  OpCode activation = OpCode::kGeluTanh;  // an op of one operand
  bool gated = false;                     // T5: the activated branch times another
  ElementType type = ElementType::kF32;
};

// A layer of T5's encoder, without biases. Attention is not scaled. Symbols: batch, tokens. Activation: hidden [batch,
// tokens, width]. Table: position_bias [1, heads, tokens, tokens]. Parameters: norm1 and norm2 [width], q.weight,
// k.weight, v.weight, o.weight, wi.weight, wi_gate.weight (gated only), wo.weight. Output: hidden.
Result<Program> t5_layer(const TextLayerShape& shape);

// A layer of CLIP's text encoder. Attention is causal. Symbols: batch, tokens. Activation: hidden [batch, tokens,
// width]. Parameters: .weight and .bias of norm1, norm2, q, k, v, out, fc1 and fc2. Output: hidden.
Result<Program> clip_layer(const TextLayerShape& shape);

}  // namespace ditfleet::region
