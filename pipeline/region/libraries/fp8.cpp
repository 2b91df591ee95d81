#include "pipeline/region/libraries/fp8.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/reciprocal.h>

#include <algorithm>
#include <cmath>

#include "pipeline/region/ir/program.h"
#include "pipeline/region/libraries/driver.h"

namespace ditfleet::region {
namespace {

at::Tensor as_float(const at::Tensor& x) { return x.to(c10::ScalarType::Float); }

// cuBLASLt has no algorithm with row scales for long sums of up to 256 rows (pytorch/ao issue 4582).
constexpr std::int64_t kLeastRows = 272;

// LibTorch's own kernels, for products for which cuBLASLt has no algorithm and GPUs on which it has no row scales. Rows
// and scales must be aligned to 16 bytes.
at::Tensor by_scaled_mm(const Fp8Product& p) {
  at::Tensor codes = p.x.flatten(0, -2).contiguous(), scales = p.x_scales.reshape({-1, 1}).clone();
  const std::int64_t rows = codes.size(0);
  if (rows < kLeastRows) {
    const std::int64_t more[] = {0, 0, 0, kLeastRows - rows};
    codes = at::constant_pad_nd(codes.view(c10::ScalarType::Byte), more).view(codes.scalar_type());
    scales = at::constant_pad_nd(scales, more);
  }
  const at::Tensor sum = at::_scaled_mm(codes, p.weight.t(), scales, p.weight_scales.unsqueeze(0),
                                        p.bias.defined() ? std::optional(p.bias) : std::nullopt, /*scale_result=*/{},
                                        c10::ScalarType::BFloat16, /*use_fast_accum=*/true)
                             .narrow(0, 0, rows);
  auto sizes = p.x.sizes().vec();
  sizes.back() = p.weight.size(0);
  return p.addend.defined() ? sum.view(sizes) + p.addend : sum.view(sizes);
}

}  // namespace

bool has_fp8_products(c10::Device device) {
  if (device.is_cpu()) return true;
  const auto cuda = driver();
  int handle = 0, major = 0, minor = 0;
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
  return cuda && (*cuda)->device(&handle, std::max<int>(0, device.index())) == 0 &&
         (*cuda)->attribute(&major, kMajor, handle) == 0 && (*cuda)->attribute(&minor, kMinor, handle) == 0 &&
         10 * major + minor >= 89;
}

at::Tensor fp8_row_scales(const at::Tensor& x) {
  return at::clamp(as_float(at::amax(at::abs(x), {-1}, /*keepdim=*/true)) * (1 / kLargestF8), kLeastRowScale);
}

at::Tensor fp8_codes(const at::Tensor& x, const at::Tensor& scales) {
  return at::clamp(as_float(x) * scales.reciprocal(), -kLargestF8, kLargestF8).to(c10::ScalarType::Float8_e4m3fn);
}

std::pair<at::Tensor, at::Tensor> fp8_heads(const at::Tensor& v) {
  const at::Tensor scales = at::clamp(
      at::linalg_vector_norm(v, INFINITY, {-3, -1}, /*keepdim=*/true, c10::ScalarType::Float) * (1 / kLargestF8),
      kLeastRowScale);
  return {fp8_codes(v, scales).contiguous(), scales.squeeze(-1).squeeze(-2)};
}

at::Tensor fp8_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>& attend) {
  const auto type = v.scalar_type();
  const auto [codes, scales] = fp8_heads(v);
  const at::Tensor out = attend(q.to(type), k.to(type), codes.to(type));  // the result is linear in v
  return (as_float(out) * scales.unsqueeze(-2).unsqueeze(-1)).to(type);
}

at::Tensor fp8_linear(const Fp8Product& p, c10::ScalarType type) {
  if (p.x.is_cuda() && type == c10::ScalarType::BFloat16) return by_scaled_mm(p);
  at::Tensor sum = at::matmul(as_float(p.x), as_float(p.weight).t()) * p.x_scales * p.weight_scales;
  if (p.bias.defined()) sum = sum + as_float(p.bias);
  if (p.addend.defined()) sum = sum + as_float(p.addend);
  return sum.to(type);
}

}  // namespace ditfleet::region
