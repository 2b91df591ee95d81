#include "pipeline/region/libraries/fp8.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/matmul.h>

namespace ditfleet::region {
namespace {

at::Tensor as_float(const at::Tensor& x) { return x.to(c10::ScalarType::Float); }

}  // namespace

at::Tensor fp8_row_scales(const at::Tensor& x) {
  return at::clamp(as_float(at::amax(at::abs(x), {-1}, /*keepdim=*/true)) * (1 / kFp8Largest), kFp8SmallestScale);
}

at::Tensor fp8_codes(const at::Tensor& x, const at::Tensor& scales) {
  return at::clamp(as_float(x) / scales, -kFp8Largest, kFp8Largest).to(c10::ScalarType::Float8_e4m3fn);
}

at::Tensor fp8_linear(const Fp8Product& p, c10::ScalarType type) {
  at::Tensor sum = at::matmul(as_float(p.x), as_float(p.weight).t()) * p.x_scales * p.weight_scales;
  if (p.bias.defined()) sum = sum + as_float(p.bias);
  if (p.addend.defined()) sum = sum + as_float(p.addend);
  return sum.to(type);
}

}  // namespace ditfleet::region
