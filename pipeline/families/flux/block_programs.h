// FLUX's two repeated blocks, written in the region compiler's IR.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "pipeline/region/ir/builder.h"

namespace ditfleet::region {

// The sizes and settings of a block that the model fixes.
struct BlockShape {
  std::int64_t heads = 1, head_dim = 2;
  ElementType type = ElementType::kF32;
  std::int64_t mlp_ratio = 4;
  bool adapters = false;  // at every linear: Builder::adapted_slots()
  // In the order of kDoubleLinears or kSingleLinears; empty: all kOwn.
  std::vector<Builder::Weight> weights = {};

  std::int64_t width() const { return heads * head_dim; }
  std::int64_t mlp_width() const { return mlp_ratio * width(); }
  // The same for all FLUX blocks. After each row of attention's result there is space: a single block stores the
  // MLP's hidden activations and the products with the adapters' A there, a double block only the latter. Not a power
  // of two, to avoid partition conflicts.
  std::int64_t attention_token_stride() const { return width() + mlp_width() + kMostAdapterColumns + 64; }
};

inline constexpr std::array<const char*, 8> kDoubleLinears = {"image.qkv", "image.out", "image.mlp_in", "image.mlp_out",
                                                              "text.qkv",  "text.out",  "text.mlp_in",  "text.mlp_out"};
inline constexpr std::array<const char*, 3> kSingleLinears = {"qkv", "mlp_in", "out"};

// FLUX's double-stream block. D = width.
//   symbols      batch, image, text
//   activations  image [batch, image, D], text [batch, text, D]
//   tables       rope f32 [text + image, head_dim]: cos and sin of each pair, text tokens first;
//                {image,text}.{attention,mlp}_{shift,scale,gate} [batch, 1, D], where scale is 1 + the model's scale
//   parameters   the members of StreamSlots, with the prefixes "image." and "text."
//   outputs      image, text
// With adapters each linear NAME also has the symbol NAME.rank and the input NAME.adapter. The columns of B follow the
// weight's own columns in NAME.weight, or are NAME.up. An f8 weight has NAME.scale.
Result<Program> flux_double_block(const BlockShape& shape);

// FLUX's single-stream block.
//   symbols      batch, tokens
//   activations  tokens [batch, tokens, D]
//   tables       rope f32 [tokens, head_dim]; shift, scale and gate [batch, 1, D]
//   parameters   the members of SingleBlockSlots
//   outputs      tokens
// Linears as above, except that in mlp_in.weight the columns of B precede the weight's own columns.
Result<Program> flux_single_block(const BlockShape& shape);

}  // namespace ditfleet::region
