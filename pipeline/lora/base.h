// The linears of a base model that an adapter can change, and their names in adapter files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ditfleet::pipeline {

// A linear by its name in diffusers (transformers for the encoders): "transformer_blocks.0.attn.to_q",
// "encoder.layers.1.mlp.fc2", "encoder.block.0.layer.0.SelfAttention.q".
struct BaseLinear {
  std::string name;
  std::size_t slot;        // index of the component's matrix that computes it; several linears may share a matrix
  std::int64_t first_row;  // in that matrix
  std::int64_t in, out;
};

// Rows of one matrix.
struct LoraPiece {
  std::size_t slot;
  std::int64_t first_row, rows;
};

// The rows that one pair of A and B changes. The rows of B belong to the pieces, in order.
struct LoraTarget {
  std::string name;  // for messages
  std::int64_t in, out;
  std::vector<LoraPiece> pieces;
  std::vector<LoraPiece> linears = {};  // of a fused matrix: the rows of each linear, in the order of B; else empty
  std::size_t component = 0;            // index in LoraBase; set by LoraNames
  bool takes_difference = false;        // a difference of the weight is applied
  bool takes_lone_bias = true;          // a bias is applied without A and B
  bool in_kohya = true;                 // false: diffusers leaves it out of files with kohya's prefix, lora_unet_
};

// A network of the model. A module name in a file is one of the prefixes, followed by a linear's name or an alias.
struct LoraComponent {
  std::string name;                   // in diffusers ("text_encoder"); also the prefix of its settings in metadata
  std::vector<std::string> prefixes;  // "transformer.", "lora_unet_"
  std::vector<BaseLinear> linears;
  std::vector<LoraTarget> aliases = {};     // names that other trainers use
  std::vector<std::string> elsewhere = {};  // names of linears that only other models of the family have
  bool encodes_text = false;
};

struct LoraBase {
  std::string family;                     // for messages
  std::vector<LoraComponent> components;  // a module without a known prefix belongs to the first
  bool takes_diff_b = false;              // .diff_b is applied as a bias; else it is left out, as in diffusers
  // The linear that reads latents: with other widths it is for a model that reads images beside them. May be empty.
  std::string reads_latents = {};
};

// What stands before the names of a transformer's linears, in any family: of diffusers, ComfyUI, kohya, OneTrainer,
// LyCORIS and DiffSynth.
inline const std::vector<std::string> kTransformerPrefixes = {
    "transformer.", "diffusion_model.", "model.diffusion_model.", "lora_unet_", "lora_transformer_",
    "lycoris_",     "pipe.dit."};

}  // namespace ditfleet::pipeline
