#include "pipeline/nn/rope.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <cmath>

namespace ditfleet::pipeline {
namespace {

using c10::ScalarType;
constexpr double kTheta = 10000;  // of timesteps

}  // namespace

at::Tensor rope_axis(const at::Tensor& positions, std::int64_t channels, double theta, bool fp32_angles) {
  // A grid of tokens has few positions along an axis.
  const auto [values, of_token] =
      at::_unique(positions.to(ScalarType::Double), /*sorted=*/true, /*return_inverse=*/true);
  const at::Tensor exponents = at::arange(0, channels, 2, ScalarType::Double) / static_cast<double>(channels);
  at::Tensor angles = at::outer(values, at::reciprocal(at::pow(theta, exponents)));
  if (fp32_angles) angles = angles.to(ScalarType::Float);
  return at::complex(at::cos(angles).to(ScalarType::Float), at::sin(angles).to(ScalarType::Float))
      .index_select(0, of_token);
}

std::pair<at::Tensor, at::Tensor> grid_positions(std::int64_t rows, std::int64_t columns) {
  return {at::arange(rows, ScalarType::Float).unsqueeze(1).expand({rows, columns}).reshape({-1}),
          at::arange(columns, ScalarType::Float).unsqueeze(0).expand({rows, columns}).reshape({-1})};
}

std::int64_t tokens_of(const std::vector<TokenGrid>& grids) {
  std::int64_t tokens = 0;
  for (const TokenGrid& grid : grids) tokens += grid.tokens();
  return tokens;
}

std::array<at::Tensor, 3> picture_positions(std::int64_t text, const std::vector<TokenGrid>& grids, double apart) {
  std::vector<std::vector<at::Tensor>> axes(3, {at::zeros({text}, ScalarType::Float)});
  for (std::size_t i = 0; i < grids.size(); ++i) {
    const auto [row, column] = grid_positions(grids[i].rows, grids[i].columns);
    axes[0].push_back(at::full({grids[i].tokens()}, apart * static_cast<double>(i), ScalarType::Float));
    axes[1].push_back(row);
    axes[2].push_back(column);
  }
  return {at::cat(axes[0]), at::cat(axes[1]), at::cat(axes[2])};
}

at::Tensor rope_of(std::span<const at::Tensor> positions, std::span<const std::int64_t> channels, c10::Device device,
                   double theta, bool fp32_angles) {
  std::vector<at::Tensor> axes;
  for (const at::Tensor& one : positions) axes.push_back(rope_axis(one, channels[axes.size()], theta, fp32_angles));
  return at::cat(axes, 1).unsqueeze(0).unsqueeze(2).to(device);
}

at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& table) {
  const at::Tensor pairs = at::view_as_complex(x.to(ScalarType::Float).contiguous().unflatten(-1, {x.size(-1) / 2, 2}));
  return at::view_as_real(pairs * table).flatten(3).to(x.scalar_type());
}

HalvesRope halves_rope(const at::Tensor& angles, ScalarType type) {
  const at::Tensor wide = angles.unsqueeze(1), cos = at::cos(wide).to(type), sin = at::sin(wide).to(type);
  return {at::cat({cos, cos}, -1), at::cat({-sin, sin}, -1)};
}

at::Tensor rope_frequencies(std::int64_t dim, double theta, c10::Device device) {
  const at::Tensor exponents = at::arange(0, dim, 2, ScalarType::Float) / dim;
  return at::reciprocal(at::pow(theta, exponents)).to(device);
}

at::Tensor apply_rope(const at::Tensor& x, const HalvesRope& rope) {
  const std::int64_t half = x.size(-1) / 2;
  const at::Tensor swapped = at::cat({x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
  return (x * rope.cos + swapped * rope.sin).to(x.scalar_type());
}

at::Tensor sinusoids(const at::Tensor& values, std::int64_t count, double scale) {
  const auto fp32 = values.options().dtype(ScalarType::Float);
  const at::Tensor frequencies =
      at::exp(-std::log(kTheta) * at::arange(0, count / 2, fp32) / static_cast<double>(count / 2));
  const at::Tensor angles = values.to(ScalarType::Float).unsqueeze(1) * frequencies.unsqueeze(0) * scale;
  return at::cat({at::cos(angles), at::sin(angles)}, 1);
}

at::Tensor rope_rows(const at::Tensor& table) {
  return at::view_as_real(table).view({table.size(1), 2 * table.size(3)});
}

}  // namespace ditfleet::pipeline
