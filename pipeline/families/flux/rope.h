// Rotary position embedding (nn/rope.h) over three axes: text 0, row, column.
#pragma once

#include "pipeline/device/device.h"
#include "pipeline/families/flux/config.h"
#include "pipeline/nn/rope.h"

namespace ditfleet::pipeline {

// Returns [1, text + rows · columns, 1, head_dim / 2] complex64 on the device: cos + i sin of each token's angles, text
// tokens first. Positions are rounded to placement.dtype first, as in diffusers (bf16 rounds above 256). Frequencies
// and angles are computed in float64.
at::Tensor rope_table(const FluxConfig& config, std::int64_t text, std::int64_t rows, std::int64_t columns,
                      Placement placement);

}  // namespace ditfleet::pipeline
