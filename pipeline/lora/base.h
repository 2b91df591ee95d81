// The linears of a base model as an adapter may name them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ditfleet::pipeline {

enum class LoraPart { kTransformer, kClip, kT5 };

// A linear by the name that diffusers (transformers for the encoders) gives it: "transformer_blocks.0.attn.to_q",
// "encoder.layers.1.mlp.fc2", "encoder.block.0.layer.0.SelfAttention.q".
struct BaseLinear {
  std::string name;
  std::size_t slot;        // which of the part's matrices computes it: several linears may be rows of one
  std::int64_t first_row;  // of that matrix
  std::int64_t in, out;
};

struct LoraBase {
  std::vector<BaseLinear> transformer, clip, t5;
};

}  // namespace ditfleet::pipeline
