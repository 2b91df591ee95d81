#include "pipeline/families/flux/rope.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

namespace ditfleet::pipeline {

at::Tensor rope_table(const FluxConfig& config, std::int64_t text, const std::vector<TokenGrid>& grids,
                      Placement placement) {
  using c10::ScalarType;
  std::vector<std::vector<at::Tensor>> axes(3, {at::zeros({text}, ScalarType::Float)});
  std::int64_t tokens = text;
  for (std::size_t i = 0; i < grids.size(); ++i) {
    tokens += grids[i].tokens();
    if (placement.device.is_meta()) continue;
    const auto [row, column] = grid_positions(grids[i].rows, grids[i].columns);
    axes[0].push_back(at::full({grids[i].tokens()}, static_cast<double>(i), ScalarType::Float));
    axes[1].push_back(row);
    axes[2].push_back(column);
  }
  if (placement.device.is_meta())
    return at::empty({1, tokens, 1, config.head_dim / 2},
                     at::TensorOptions(ScalarType::ComplexFloat).device(placement.device));
  std::vector<at::Tensor> positions;
  for (const auto& axis : axes) positions.push_back(at::cat(axis).to(placement.dtype));
  return rope_of(positions, config.axes_dims_rope, placement.device);
}

}  // namespace ditfleet::pipeline
