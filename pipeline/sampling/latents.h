// Latents: drawing, packing into tokens, stepping, and pixels at the end.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "pipeline/api/media.h"
#include "pipeline/device/device.h"

namespace ditfleet::pipeline {

// [1, channels, rows, columns] on the CPU: what torch.randn draws from a CPU generator with this seed in this
// type (bf16 noise is another draw, not rounded fp32 noise). The generator uses the seed's low 32 bits.
at::Tensor draw_noise(std::int64_t seed, std::int64_t channels, std::int64_t rows, std::int64_t columns,
                      c10::ScalarType dtype);

// [1, C, h, w] → [1, h/2 · w/2, 4·C]: a token is 2 × 2 latent pixels, channel order (C, 2, 2). h and w are even.
at::Tensor pack_latents(const at::Tensor& latents);
// The reverse, for a picture of rows × columns tokens.
at::Tensor unpack_latents(const at::Tensor& tokens, std::int64_t rows, std::int64_t columns);

// One Euler step: tokens + (next − now) · velocity. now and next are 0-dim fp32 tensors on the tokens' device, so
// that the product is rounded to velocity's type before the fp32 sum, as in diffusers. Returns velocity's type.
at::Tensor euler_step(const at::Tensor& tokens, const at::Tensor& velocity, const at::Tensor& now,
                      const at::Tensor& next);

// Of each tensor, whether no element is NaN or infinity. One reduction a tensor, then waits for the device.
std::vector<bool> are_finite(const std::vector<at::Tensor>& tensors);

// Decoder output [1, C, H, W] → [0, 1] in the same type.
at::Tensor unit_range(const at::Tensor& decoded);
// [1, 3 or 1, H, W] in [0, 1], no NaN among them → 8 bit RGB, rounded half to even. Waits for the device.
Media to_media(const at::Tensor& unit);

}  // namespace ditfleet::pipeline
