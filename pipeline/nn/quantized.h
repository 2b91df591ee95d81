// Quantized weights of a linear in memory. Formats and numerics follow bitsandbytes 0.50 (NF4) and torchao 0.18 (fp8).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "pipeline/region/programs/dequantize.h"
#include "pipeline/weights/nf4.h"

namespace ditfleet::pipeline {

// Consecutive rows of a weight, in one of these formats, which the element type of `codes` identifies:
//   NF4    codes uint8 [⌈rows · in / 2⌉]: two 4-bit codes per byte, the first one in the high nibble; scales fp32
//          [⌈rows · in / 64⌉]: the largest magnitude of each 64 consecutive values, regardless of rows
//   fp8    codes float8_e4m3fn or float8_e5m2 [rows, in]; scales fp32 [rows]
//   GGUF   codes uint8, the blocks of the file; no scales; `blocks` is the format (pipeline/weights/gguf.h)
//   plain  codes bf16 or fp32 [rows, in]; no scales. For rows that a file stores unquantized.
struct QuantizedRows {
  at::Tensor codes, scales;
  std::int64_t rows = 0;
  std::uint8_t blocks = 0;
};

// A weight [out, in]. Immutable; its tensors are contiguous and on one device.
struct QuantizedWeight {
  std::vector<QuantizedRows> parts;  // in order of rows
  std::int64_t out = 0, in = 0;
  // The type of the product: inputs and weight are converted to it. With `dynamic`: the type of the result before its
  // conversion to the input's type.
  c10::ScalarType compute = c10::ScalarType::Float;
  // Computes products in fp8: each call quantizes its input by row. The weight has one part then, in float8_e4m3fn.
  bool dynamic = false;
  std::shared_ptr<const region::Dequantizer> program = nullptr;  // for a GPU; null: LibTorch's operators

  std::int64_t bytes() const;
  // "nf4", "fp8 with dynamic activations", "fp8", "Q4_K"; for logs and signatures.
  std::string_view format() const;
};

// Quantizes a weight [rows, in] on its device, bit for bit as bitsandbytes does (blocks of 64, no double quantization).
QuantizedRows quantize_nf4(const at::Tensor& weight);
// One scale per row: max / 448 in fp32. float8_e4m3fn.
QuantizedRows quantize_fp8(const at::Tensor& weight);

// The values of GGUF's blocks on the CPU, in fp32 [values]. `codes`: uint8, on the CPU.
at::Tensor gguf_tensor(std::uint8_t blocks, const at::Tensor& codes);

// Computes the weight's values in fp32 and rounds them once to the type of `to` [out, in], fp32 or bf16, contiguous.
void dequantize(const QuantizedWeight& weight, const at::Tensor& to);
at::Tensor dequantized(const QuantizedWeight& weight, c10::ScalarType type);

// x [.., in] · weightᵀ + bias → [.., out] of x's type. `bias`: [out], or undefined.
at::Tensor quantized_linear(const QuantizedWeight& weight, const at::Tensor& bias, const at::Tensor& x);

}  // namespace ditfleet::pipeline
