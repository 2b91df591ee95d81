// Wan's repeated block, written in the region compiler's IR.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "pipeline/region/ir/builder.h"

namespace ditfleet::region {

// The sizes and settings of a block that the model fixes.
struct WanBlockShape {
  std::int64_t heads = 1, head_dim = 2, ffn = 4;
  double eps = 1e-6;
  bool cross_norm = true;  // norm2 before cross-attention
  bool still = false;      // the first tokens have modulation rows of their own
  bool image = false;      // cross-attention also to the tokens of an image
  ElementType type = ElementType::kF32;
  bool adapters = false;                      // at every linear: Builder::adapted_slots()
  std::vector<Builder::Weight> weights = {};  // in the order of kWanLinears; empty: all kOwn

  std::int64_t width() const { return heads * head_dim; }
};

inline constexpr std::array<const char*, 8> kWanLinears = {"qkv",       "out",    "cross_q", "cross_kv",
                                                           "cross_out", "mlp_in", "mlp_out", "image_kv"};
// Rows of the modulation, in the order of scale_shift_table.
inline constexpr std::array<const char*, 6> kWanRows = {"attention_shift", "attention_scale", "attention_gate",
                                                        "mlp_shift",       "mlp_scale",       "mlp_gate"};

// D = width. Norms, modulation and gated sums are computed in f32 and rounded once.
//   symbols      batch, tokens, text
//   activations  tokens [batch, tokens, D], text [batch, text, D]
//   tables       rope f32 [tokens, head_dim]: cos and sin of each pair; kWanRows f32 [batch, 1, D], where scale is
//                1 + the model's scale
//   image        also the symbol and the activation image [batch, image, D], the linear image_kv and the norm
//                image_norm_k; what the queries find in it is added to what they find in the text
//   still        the symbol and the activation still [batch, still, D] precede the tokens, perhaps none; the table
//                rope is [still + tokens, head_dim], and kWanRows are [batch, 2, D], those of the still tokens first
//   parameters   the members of WanBlockSlots other than the table; norm2.weight and norm2.bias are f32
//   outputs      still, if there is one, and tokens
// An f8 weight has NAME.scale. With adapters each linear NAME also has the symbol NAME.rank and the input NAME.adapter.
// The columns of B follow the weight's own columns in NAME.weight, or are NAME.up.
Result<Program> wan_block(const WanBlockShape& shape);

}  // namespace ditfleet::region
