#include "pipeline/nn/rope.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

namespace ditfleet::pipeline {
namespace {

using c10::ScalarType;
constexpr double kTheta = 10000;

}  // namespace

at::Tensor rope_axis(const at::Tensor& positions, std::int64_t channels) {
  const at::Tensor exponents = at::arange(0, channels, 2, ScalarType::Double) / static_cast<double>(channels);
  const at::Tensor angles = at::outer(positions.to(ScalarType::Double), at::reciprocal(at::pow(kTheta, exponents)));
  return at::complex(at::cos(angles).to(ScalarType::Float), at::sin(angles).to(ScalarType::Float));
}

at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& table) {
  const at::Tensor pairs = at::view_as_complex(x.to(ScalarType::Float).contiguous().unflatten(-1, {x.size(-1) / 2, 2}));
  return at::view_as_real(pairs * table).flatten(3).to(x.scalar_type());
}

at::Tensor rope_rows(const at::Tensor& table) {
  return at::view_as_real(table).view({table.size(1), 2 * table.size(3)});
}

}  // namespace ditfleet::pipeline
