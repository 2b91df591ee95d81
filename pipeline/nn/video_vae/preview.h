// A cheap picture of a video VAE's latents, for previews.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ditfleet::pipeline {

inline constexpr std::int64_t kPreviewChannels = 16;  // of the VAE whose latents video_preview() knows

// The middle frame of latents [1, C, frames, rows, columns] as [1, 3, rows, columns], about −1 to 1, on the host. Of a
// VAE with another number of channels than 16 it sees those that both have.
at::Tensor video_preview(const at::Tensor& latents);

// The middle frame of latents [1, C, frames, rows, columns], averaged so that it has at most 32 rows and columns:
// [1, C, 1, rows, columns] in fp32. A VAE decodes it quickly.
at::Tensor small_frame(const at::Tensor& latents);

}  // namespace ditfleet::pipeline
