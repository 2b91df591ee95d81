// From the names that adapters' files use to the matrices of a base model.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "pipeline/lora/base.h"

namespace ditfleet::pipeline {

// Rows of one matrix.
struct LoraPiece {
  std::size_t slot;
  std::int64_t first_row, rows;
};

// What one pair of A and B changes. The rows of B belong to the pieces one after the other.
struct LoraTarget {
  LoraPart part;
  std::string name;  // diffusers' or BFL's, for messages
  std::int64_t in, out;
  std::vector<LoraPiece> pieces;
  std::vector<LoraPiece> linears = {};  // of a fused matrix: the rows of each linear, in the order of B's; else empty
};

// Knows every linear of the base by diffusers' name, by BFL's (double_blocks.0.img_attn.qkv, single_blocks.0.linear1)
// and by XLabs' (double_blocks.0.processor.qkv_lora1); with dots or, as kohya writes names, with underscores; below
// the prefixes transformer. diffusion_model. lora_unet_ lora_transformer_ (the transformer), text_encoder. lora_te1_
// lora_te_ text_encoders.clip_l.transformer. (CLIP), text_encoder_2. lora_te2_ lora_te3_
// text_encoders.t5xxl.transformer. (T5), or none (the transformer), and PEFT's base_model.model. before any.
// Immutable and thread safe.
class LoraNames {
 public:
  explicit LoraNames(const LoraBase& base);

  // The module whose matrices a key holds ("transformer.transformer_blocks.0.attn.to_q"). Null: none of this base.
  const LoraTarget* find(std::string_view module) const;
  // Whether the base has such a linear in a block of another number, or another FLUX model has it: then the adapter is
  // for that.
  bool knows_elsewhere(std::string_view module) const;

  struct Split {
    LoraPart part;
    std::string_view rest;  // without the prefix
  };
  static Split split(std::string_view module);

 private:
  void add(LoraPart part, const std::string& name, LoraTarget target);
  void add_bfl_names(const LoraBase& base);
  void note_shape(LoraPart part, const std::string& name);

  std::unordered_map<std::string, LoraTarget> targets_;  // by part and flattened name
  std::unordered_set<std::string> shapes_of_names_;      // the same with numbers of blocks left out
};

}  // namespace ditfleet::pipeline
