// Latents: noise, packing into tokens, Euler steps, and conversion to pixels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "pipeline/api/media.h"
#include "pipeline/device/device.h"

namespace ditfleet::pipeline {

// Returns `count` tensors of this size on the CPU, equal to torch.randn with one CPU generator, this seed and this
// type. bf16 noise is a separate draw, not rounded fp32 noise. The generator uses the low 32 bits of the seed.
std::vector<at::Tensor> draw_noises(std::int64_t seed, at::IntArrayRef size, c10::ScalarType dtype, int count);
inline at::Tensor draw_noise(std::int64_t seed, at::IntArrayRef size, c10::ScalarType dtype) {
  return draw_noises(seed, size, dtype, 1)[0];
}

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

// Latents with as much noise as the noise level `sigma`, in their type: as scale_noise() of diffusers'
// FlowMatchEulerDiscreteScheduler, sigma · noise + (1 − sigma) · latents.
at::Tensor add_noise(const at::Tensor& latents, const at::Tensor& noise, float sigma);

// Whether each tensor is free of NaN and infinity. Runs one reduction per tensor and waits for the device.
std::vector<bool> are_finite(const std::vector<at::Tensor>& tensors);

// A picture, resized with Lanczos, as [1, 3, height, width] with values from −1 to 1, in fp32 on the CPU; on a device
// without memory, a tensor that stands for it.
at::Tensor to_pixels(const Media& image, std::int64_t width, std::int64_t height, c10::Device device);

// Maps decoder output [1, C, H, W] to [0, 1], in the same type.
at::Tensor unit_range(const at::Tensor& decoded);
// Converts [1, 3 or 1, H, W], or [1, 3 or 1, frames, H, W], with values in [0, 1] and without NaN to 8-bit RGB, rounded
// half to even. Waits for the device.
Media to_media(const at::Tensor& unit);

}  // namespace ditfleet::pipeline
