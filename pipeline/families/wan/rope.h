// Rotary position embedding (nn/rope.h) over three axes: frame, row, column.
#pragma once

#include "pipeline/families/wan/config.h"
#include "pipeline/nn/rope.h"

namespace ditfleet::pipeline {

// Returns [1, frames · rows · columns, 1, head_dim / 2] complex64 on the device: cos + i sin of each token's angles.
// The arguments count tokens. Angles are computed in float64. Throws Failure (kInvalidArgument) beyond
// rope_max_seq_len.
at::Tensor wan_rope_table(const WanConfig& config, std::int64_t frames, std::int64_t rows, std::int64_t columns,
                          c10::Device device);

}  // namespace ditfleet::pipeline
