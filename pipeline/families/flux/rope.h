// Rotary position embedding over three axes: text 0, row, column.
#pragma once

#include <ATen/core/Tensor.h>

#include "pipeline/device/device.h"
#include "pipeline/families/flux/config.h"

namespace ditfleet::pipeline {

// Returns [1, text + rows · columns, 1, head_dim / 2] complex64 on the device: cos + i sin of each token's angles, text
// tokens first. Positions are rounded to placement.dtype first, as in diffusers (bf16 rounds above 256). Frequencies
// and angles are computed in float64.
at::Tensor rope_table(const FluxConfig& config, std::int64_t text, std::int64_t rows, std::int64_t columns,
                      Placement placement);

// Rotates adjacent pairs of x [1, tokens, heads, head_dim] by the table. Computes in fp32 and returns x's type.
at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& table);

}  // namespace ditfleet::pipeline
