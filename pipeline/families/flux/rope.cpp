#include "pipeline/families/flux/rope.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace ditfleet::pipeline {

at::Tensor rope_table(const FluxConfig& config, std::int64_t text, std::int64_t rows, std::int64_t columns,
                      Placement placement) {
  using c10::ScalarType;
  if (placement.device.is_meta())
    return at::empty({1, text + rows * columns, 1, config.head_dim / 2},
                     at::TensorOptions(ScalarType::ComplexFloat).device(placement.device));
  const auto [row, column] = grid_positions(rows, columns);
  const at::Tensor before = at::zeros({text}, ScalarType::Float);
  std::vector<at::Tensor> positions;
  for (const at::Tensor& image : {at::zeros({rows * columns}, ScalarType::Float), row, column})
    positions.push_back(at::cat({before, image}).to(placement.dtype));
  return rope_of(positions, config.axes_dims_rope, placement.device);
}

}  // namespace ditfleet::pipeline
