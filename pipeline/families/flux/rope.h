// Rotary position embedding (nn/rope.h) over three axes: picture, row, column.
#pragma once

#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/families/flux/config.h"
#include "pipeline/nn/rope.h"

namespace ditfleet::pipeline {

// Returns [1, text + tokens of all grids, 1, head_dim / 2] complex64 on the device: cos + i sin of each token's angles.
// The text's tokens come first and are at 0; those of grid i are at i on the first axis. Positions are rounded to
// placement.dtype first, as in diffusers (bf16 rounds above 256). Frequencies and angles are computed in float64.
at::Tensor rope_table(const FluxConfig& config, std::int64_t text, const std::vector<TokenGrid>& grids,
                      Placement placement);

}  // namespace ditfleet::pipeline
