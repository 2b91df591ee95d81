// Rotary position embedding (RoPE, https://arxiv.org/abs/2104.09864) of adjacent pairs over several axes or of halves,
// and the sinusoidal embedding of timesteps.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace ditfleet::pipeline {

// The part of a table that rotates `channels` channels by positions along one axis: [n] → [n, channels / 2] complex64,
// cos + i sin of each angle. Angles are computed in float64, on a CPU; `fp32_angles`: and rounded to fp32.
at::Tensor rope_axis(const at::Tensor& positions, std::int64_t channels, double theta = 10000,
                     bool fp32_angles = false);

struct TokenGrid {
  std::int64_t rows, columns;
  std::int64_t tokens() const { return rows * columns; }
};

std::int64_t tokens_of(const std::vector<TokenGrid>& grids);

// The row and the column of each token of a picture, both [rows · columns] fp32 on a CPU.
std::pair<at::Tensor, at::Tensor> grid_positions(std::int64_t rows, std::int64_t columns);

// The positions of text and of several pictures along three axes, [text + tokens_of(grids)] fp32 on a CPU: the number
// of the picture times `apart`, row and column. The text's tokens come first, at 0.
std::array<at::Tensor, 3> picture_positions(std::int64_t text, const std::vector<TokenGrid>& grids, double apart = 1);

// The table of tokens with these positions, one [tokens] for each axis: [1, tokens, 1, sum of channels / 2] complex64
// on the device. The other arguments: as rope_axis().
at::Tensor rope_of(std::span<const at::Tensor> positions, std::span<const std::int64_t> channels, c10::Device device,
                   double theta = 10000, bool fp32_angles = false);

// Rotates adjacent pairs of x [1, tokens, heads, head_dim] by the table [1, tokens, 1, head_dim / 2]. Computes in fp32
// and returns x's type.
at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& table);

// A view of the table as input of compiled blocks: [tokens, head_dim] fp32, cosine and sine of each pair.
at::Tensor rope_rows(const at::Tensor& table);

// What rotates the two halves (a, b) of a head, as transformers does: (a cos − b sin, b cos + a sin).
struct HalvesRope {
  at::Tensor cos, sin;  // [tokens, 1, head_dim]; the first half of `sin` is negated
};
// `angles`: [tokens, head_dim / 2] fp32. Rounds cosines and sines to `type`.
HalvesRope halves_rope(const at::Tensor& angles, c10::ScalarType type);
// The frequencies of a head of `dim` channels, theta^(−2i / dim), as transformers computes them: [dim / 2] fp32 on the
// device.
at::Tensor rope_frequencies(std::int64_t dim, double theta, c10::Device device);
// Rotates x [..., tokens, heads, head_dim]. Computes in the wider of both types and returns x's type.
at::Tensor apply_rope(const at::Tensor& x, const HalvesRope& rope);

// The sinusoidal embedding of timesteps with period 10000: [n] → [n, count] fp32, cosines, then sines. Multiplies the
// angles by `scale`.
at::Tensor sinusoids(const at::Tensor& values, std::int64_t count, double scale = 1);

}  // namespace ditfleet::pipeline
