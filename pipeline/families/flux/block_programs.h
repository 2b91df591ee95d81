// FLUX's two repeated blocks, written in the region compiler's IR.
#pragma once

#include <cstdint>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {

// The largest rank that may meet at one matrix.
inline constexpr std::int64_t kMostAdapterColumns = 1024;

// What the model fixes of a block.
struct BlockShape {
  std::int64_t heads = 1, head_dim = 2;
  ElementType type = ElementType::kF32;
  std::int64_t mlp_ratio = 4;
  bool adapters = false;  // with room for low-rank adapters at every linear: Builder::adapted_slots()

  std::int64_t width() const { return heads * head_dim; }
  std::int64_t mlp_width() const { return mlp_ratio * width(); }
  // The same for all FLUX blocks: a single block writes the MLP's hidden rows and the adapters' columns next to
  // attention's result, a double block the adapters' columns. Not a power of two, to avoid partition conflicts.
  std::int64_t attention_token_stride() const { return width() + mlp_width() + kMostAdapterColumns + 64; }
};

// FLUX's double-stream block. Symbols: batch, image, text. D = width.
// Activations image [batch, image, D], text [batch, text, D]; tables rope f32 [text + image, head_dim] (cos, sin of
// each pair in turn, text tokens first) and, for each of image and text, {attention,mlp}_{shift,scale,gate}
// [batch, 1, D], where scale is 1 + the model's; parameters as in FLUX's StreamSlots, prefixed image. and text. .
// Outputs: image, text. With adapters, symbols and inputs NAME.rank and NAME.adapter for each linear; a NAME.weight has
// B's columns behind its own.
Result<Program> flux_double_block(const BlockShape& shape);

// FLUX's single-stream block. Symbols: batch, tokens. Activation tokens [batch, tokens, D]; tables rope f32
// [tokens, head_dim], shift, scale, gate [batch, 1, D]; parameters as in FLUX's SingleBlockSlots. Output: tokens. With
// adapters as above, but for mlp_in.weight, which has B's columns in front.
Result<Program> flux_single_block(const BlockShape& shape);

}  // namespace ditfleet::region
