// Maps the module names of adapter files to the matrices of a base model.
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

// What a pair of A and B changes. The rows of B belong to the pieces, in order.
struct LoraTarget {
  LoraPart part;
  std::string name;  // from diffusers or BFL, for messages
  std::int64_t in, out;
  std::vector<LoraPiece> pieces;
  std::vector<LoraPiece> linears = {};  // fused matrices: the rows of each linear, in the order of B; else empty
};

// Every linear of the base has its names in diffusers, BFL (double_blocks.0.img_attn.qkv, single_blocks.0.linear1) and
// XLabs (double_blocks.0.processor.qkv_lora1), with dots or, in kohya's style, with underscores. Prefixes: transformer.
// diffusion_model. lora_unet_ lora_transformer_ or none (transformer); text_encoder. lora_te1_ lora_te_
// text_encoders.clip_l.transformer. (CLIP); text_encoder_2. lora_te2_ lora_te3_ text_encoders.t5xxl.transformer. (T5).
// PEFT's base_model.model. may precede any of them. Immutable and thread safe.
class LoraNames {
 public:
  explicit LoraNames(const LoraBase& base);

  // The target of a module ("transformer.transformer_blocks.0.attn.to_q"). Null: this base does not have it.
  const LoraTarget* find(std::string_view module) const;
  // Whether the base has this linear in another block, or another model of the family has it. Then the adapter was made
  // for another model.
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
  std::unordered_set<std::string> shapes_of_names_;      // the same without block numbers
};

}  // namespace ditfleet::pipeline
