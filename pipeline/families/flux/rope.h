// Rotary position embedding over three axes: text 0, row, column.
#pragma once

#include <ATen/core/Tensor.h>

#include "pipeline/device/device.h"
#include "pipeline/families/flux/config.h"

namespace ditfleet::pipeline {

// [1, text + rows · columns, 1, head_dim / 2] complex64 on the device: cos + i sin of each token's angles, text
// tokens first. Frequencies and angles are computed in float64; positions pass through placement.dtype first
// (bf16 rounds above 256), as in diffusers.
at::Tensor rope_table(const FluxConfig& config, std::int64_t text, std::int64_t rows, std::int64_t columns,
                      Placement placement);

// x: [1, tokens, heads, head_dim], adjacent pairs rotated by the table. Computed in fp32, returned in x's type.
at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& table);

}  // namespace ditfleet::pipeline
