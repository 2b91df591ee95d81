// Latents: noise, packing into tokens, Euler steps, and conversion to pixels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "pipeline/api/media.h"
#include "pipeline/device/device.h"

namespace ditfleet::pipeline {

// Returns a tensor of this size on the CPU, equal to torch.randn with a CPU generator, this seed and this type. bf16
// noise is a separate draw, not rounded fp32 noise. The generator uses the low 32 bits of the seed.
at::Tensor draw_noise(std::int64_t seed, at::IntArrayRef size, c10::ScalarType dtype);

// Converts [1, C, h, w] to [1, h/2 · w/2, 4·C]. A token is 2 × 2 latent pixels, in the order (C, 2, 2). h and w must be
// even.
at::Tensor pack_latents(const at::Tensor& latents);
// The inverse of pack_latents(), for an image of rows × columns tokens.
at::Tensor unpack_latents(const at::Tensor& tokens, std::int64_t rows, std::int64_t columns);

// The values as [n] fp32, on the device.
at::Tensor on_device(std::span<const float> values, c10::Device device);

// One Euler step: tokens + (next − now) · velocity, in velocity's type. now and next are 0-dim fp32 tensors on the
// tokens' device, so that the product is rounded to velocity's type before the fp32 sum, as in diffusers.
at::Tensor euler_step(const at::Tensor& tokens, const at::Tensor& velocity, const at::Tensor& now,
                      const at::Tensor& next);

// Whether each tensor is free of NaN and infinity. Runs one reduction per tensor and waits for the device.
std::vector<bool> are_finite(const std::vector<at::Tensor>& tensors);

// Maps decoder output [1, C, H, W] to [0, 1], in the same type.
at::Tensor unit_range(const at::Tensor& decoded);
// Converts [1, 3 or 1, H, W], or [1, 3 or 1, frames, H, W], with values in [0, 1] and without NaN to 8-bit RGB, rounded
// half to even. Waits for the device.
Media to_media(const at::Tensor& unit);

}  // namespace ditfleet::pipeline
