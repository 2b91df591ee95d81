// Quantized weights of a linear in memory. Formats and numerics follow bitsandbytes 0.50 (NF4) and torchao 0.18 (fp8).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace ditfleet::pipeline {

// The values of NF4's codes, as in bitsandbytes.
inline constexpr std::array<float, 16> kNf4Book = {-1.0F,
                                                   -0.6961928009986877F,
                                                   -0.5250730514526367F,
                                                   -0.39491748809814453F,
                                                   -0.28444138169288635F,
                                                   -0.18477343022823334F,
                                                   -0.09105003625154495F,
                                                   0.0F,
                                                   0.07958029955625534F,
                                                   0.16093020141124725F,
                                                   0.24611230194568634F,
                                                   0.33791524171829224F,
                                                   0.44070982933044434F,
                                                   0.5626170039176941F,
                                                   0.7229568362236023F,
                                                   1.0F};

// Consecutive rows of a weight, in one of these formats, which the element type of `codes` identifies:
//   NF4    codes uint8 [⌈rows · in / 2⌉]: two 4-bit codes per byte, the first one in the high nibble; scales fp32
//          [⌈rows · in / 64⌉]: the largest magnitude of each 64 consecutive values, regardless of rows
//   fp8    codes float8_e4m3fn or float8_e5m2 [rows, in]; scales fp32 [rows]
//   plain  codes bf16 or fp32 [rows, in]; no scales. For rows that a file stores unquantized.
struct QuantizedRows {
  at::Tensor codes, scales;
  std::int64_t rows = 0;
};

// A weight [out, in]. Immutable; its tensors are contiguous and on one device.
struct QuantizedWeight {
  std::vector<QuantizedRows> parts;  // in order of rows
  std::int64_t out = 0, in = 0;
  // Of the product: inputs and weight are converted to it. With `dynamic`, the type of the result before it is
  // converted to the input's.
  c10::ScalarType compute = c10::ScalarType::Float;
  // Products are computed in fp8: each call quantizes its input by row. There is one part then, in float8_e4m3fn.
  bool dynamic = false;

  std::int64_t bytes() const;
  // "nf4", "fp8 with dynamic activations", "fp8"; for logs and signatures.
  std::string_view format() const;
};

// Quantizes a weight [rows, in] on its device, bit for bit as bitsandbytes does (blocks of 64, no double quantization).
QuantizedRows quantize_nf4(const at::Tensor& weight);
// One scale per row: max / 448 in fp32. float8_e4m3fn.
QuantizedRows quantize_fp8(const at::Tensor& weight);

// The weight's values [out, in], computed in fp32 and rounded once to `type`.
at::Tensor dequantized(const QuantizedWeight& weight, c10::ScalarType type);

// x [.., in] · weightᵀ + bias → [.., out] of x's type. `bias`: [out], or undefined.
at::Tensor quantized_linear(const QuantizedWeight& weight, const at::Tensor& bias, const at::Tensor& x);

}  // namespace ditfleet::pipeline
