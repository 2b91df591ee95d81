#include "pipeline/families/flux/rope.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

namespace ditfleet::pipeline {
namespace {

constexpr double kTheta = 10000;  // FluxPosEmbed

}  // namespace

at::Tensor rope_table(const FluxConfig& config, std::int64_t text, std::int64_t rows, std::int64_t columns,
                      Placement placement) {
  using c10::ScalarType;
  if (placement.device.is_meta())
    return at::empty({1, text + rows * columns, 1, config.head_dim / 2},
                     at::TensorOptions(ScalarType::ComplexFloat).device(placement.device));
  const at::Tensor row = at::arange(rows, ScalarType::Float).unsqueeze(1).expand({rows, columns}).reshape({-1});
  const at::Tensor column = at::arange(columns, ScalarType::Float).unsqueeze(0).expand({rows, columns}).reshape({-1});
  const at::Tensor zeros = at::zeros({rows * columns}, ScalarType::Float);
  const at::Tensor before = at::zeros({text}, ScalarType::Float);
  std::vector<at::Tensor> cosines, sines;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    const std::int64_t dim = config.axes_dims_rope[axis];
    const at::Tensor position = at::cat({before, axis == 0   ? zeros
                                                 : axis == 1 ? row
                                                             : column})
                                    .to(placement.dtype)
                                    .to(ScalarType::Double);
    const at::Tensor exponents = at::arange(0, dim, 2, ScalarType::Double) / static_cast<double>(dim);
    const at::Tensor angles = at::outer(position, at::reciprocal(at::pow(kTheta, exponents)));
    cosines.push_back(at::cos(angles).to(ScalarType::Float));
    sines.push_back(at::sin(angles).to(ScalarType::Float));
  }
  return at::complex(at::cat(cosines, 1), at::cat(sines, 1)).unsqueeze(0).unsqueeze(2).to(placement.device);
}

at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& table) {
  const at::Tensor pairs =
      at::view_as_complex(x.to(c10::ScalarType::Float).contiguous().unflatten(-1, {x.size(-1) / 2, 2}));
  return at::view_as_real(pairs * table).flatten(3).to(x.scalar_type());
}

}  // namespace ditfleet::pipeline
