// A GPU program that computes the values of quantized weights.
#pragma once

#include "pipeline/region/programs/fixed_program.h"

namespace ditfleet::region {

// The kernels, in this order: nf4_bf16, nf4_f32, e4m3_bf16, e4m3_f32, e5m2_bf16, e5m2_f32. Argument: the addresses of
// codes, scales and values, the number of values, and the values per row. A thread computes kDequantizedPerThread
// values.
FixedProgram dequantize_program();

// For each format of GGUF's blocks, in their order, a kernel for bf16 and one for fp32. Argument: the addresses of the
// blocks and of the values, and the number of values.
FixedProgram gguf_program();

extern const std::string_view kGgufValues;  // pipeline/weights/gguf_values.inc

inline constexpr int kDequantizedPerThread = 16;

}  // namespace ditfleet::region
