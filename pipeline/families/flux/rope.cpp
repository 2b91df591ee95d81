#include "pipeline/families/flux/rope.h"

#include <ATen/ops/empty.h>

namespace ditfleet::pipeline {

at::Tensor rope_table(const FluxConfig& config, std::int64_t text, const std::vector<TokenGrid>& grids,
                      Placement placement) {
  if (placement.device.is_meta())
    return at::empty({1, text + tokens_of(grids), 1, config.head_dim / 2},
                     at::TensorOptions(c10::ScalarType::ComplexFloat).device(placement.device));
  auto positions = picture_positions(text, grids);
  for (at::Tensor& axis : positions) axis = axis.to(placement.dtype);
  return rope_of(positions, config.axes_dims_rope, placement.device);
}

}  // namespace ditfleet::pipeline
