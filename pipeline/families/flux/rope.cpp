#include "pipeline/families/flux/rope.h"

#include <ATen/ops/arange.h>
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
  const at::Tensor row = at::arange(rows, ScalarType::Float).unsqueeze(1).expand({rows, columns}).reshape({-1});
  const at::Tensor column = at::arange(columns, ScalarType::Float).unsqueeze(0).expand({rows, columns}).reshape({-1});
  const at::Tensor before = at::zeros({text}, ScalarType::Float);
  std::vector<at::Tensor> axes;
  for (const at::Tensor& image : {at::zeros({rows * columns}, ScalarType::Float), row, column})
    axes.push_back(rope_axis(at::cat({before, image}).to(placement.dtype), config.axes_dims_rope[axes.size()]));
  return at::cat(axes, 1).unsqueeze(0).unsqueeze(2).to(placement.device);
}

}  // namespace ditfleet::pipeline
