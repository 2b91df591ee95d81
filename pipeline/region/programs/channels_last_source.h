// The GPU program for the operations between a VAE's convolutions, for tensors in NHWC layout: group norm with
// activation, sums with biases, upsampling. Group norm needs two passes over memory, or one if add_sums computed its
// input.
#pragma once

#include "pipeline/region/programs/fixed_program.h"

namespace ditfleet::region {

// Fourteen kernels: seven per element type in the order of ChannelsLastKernel, bf16 first. Arguments are words; an
// address of 0 means that the tensor is absent:
//   sums      x y bias bias_2 out shifts sums, pixels channels samples chunks; y, bias_2 and out are ignored
//             of x + bias, for each channel of each chunk of pixels: Σd and Σd², d = value − shift; a channel's shift
//             is x + bias of its first pixel
//   add_sums  the same: out = x + y + bias + bias_2, rounded, and the sums of that; out may be y
//   scales    shifts sums weight beta bias table, pixels channels samples chunks groups eps (a double's bits)
//             expresses the group norm of the summed tensor as value · table[2c] + table[2c + 1], a pair of fp32 for
//             each sample and channel; bias is added to the value first. One block per sample and group
//   apply     x table out, pixels channels samples chunks silu
//             out = x · table[2c] + table[2c + 1], then SiLU if silu is not 0; out may be x
//   upsample  x out, rows columns channels samples
//             doubles height and width: writes each of the rows · columns pixels four times
//   add_pixels  x y bias bias_2, pixels channels
//             y = x + y + bias + bias_2, rounded once
//   norm_pixels x bias weight out, pixels channels silu
//             out = (x + bias) / |x + bias| · √channels · weight for each pixel, then SiLU; out may be x
// shifts: fp32 [samples, channels]; sums: fp32 [samples, chunks, channels, 2]; weights and biases in the element type.
// sums, add_sums, apply: samples · chunks · channels_last_slices() blocks. The others: any number of blocks.
FixedProgram channels_last_program();

enum class ChannelsLastKernel { kSums, kAddSums, kScales, kApply, kUpsample, kAddPixels, kNormPixels, kCount };

// Number of blocks per chunk of pixels; each block computes as many channels as it has threads for.
std::int64_t channels_last_slices(std::int64_t channels, std::int64_t bytes_of_element);

}  // namespace ditfleet::region
