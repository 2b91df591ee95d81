// The linears of a base model that an adapter can change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ditfleet::pipeline {

enum class LoraPart { kTransformer, kClip, kT5 };

// A linear by its name in diffusers (transformers for the encoders): "transformer_blocks.0.attn.to_q",
// "encoder.layers.1.mlp.fc2", "encoder.block.0.layer.0.SelfAttention.q".
struct BaseLinear {
  std::string name;
  std::size_t slot;        // index of the part's matrix that computes it; several linears may share a matrix
  std::int64_t first_row;  // in that matrix
  std::int64_t in, out;
};

struct LoraBase {
  std::vector<BaseLinear> transformer, clip, t5;
};

}  // namespace ditfleet::pipeline
