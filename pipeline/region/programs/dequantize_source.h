// A GPU program that computes the values of quantized weights.
#pragma once

#include <array>

#include "pipeline/region/programs/fixed_program.h"

namespace ditfleet::region {

// The values of NF4's codes, as in bitsandbytes.
inline constexpr std::array<float, 16> kNf4Values = {-1.0F,
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

// The kernels, in this order: nf4_bf16, nf4_f32, e4m3_bf16, e4m3_f32, e5m2_bf16, e5m2_f32. Argument: the addresses of
// codes, scales and values, the number of values, and the values per row. A thread computes kDequantizedPerThread
// values.
FixedProgram dequantize_program();

inline constexpr int kDequantizedPerThread = 16;

}  // namespace ditfleet::region
