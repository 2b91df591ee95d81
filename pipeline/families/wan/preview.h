// A cheap picture of Wan's latents, for previews.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ditfleet::pipeline {

inline constexpr std::int64_t kWanPreviewChannels = 16;  // of the VAE whose latents wan_preview() takes

// The middle frame of latents [1, 16, frames, rows, columns] as [1, 3, rows, columns], about −1 to 1, on the host.
at::Tensor wan_preview(const at::Tensor& latents);

// The middle frame of latents [1, C, frames, rows, columns], averaged so that it has at most 32 rows and columns:
// [1, C, 1, rows, columns] in fp32. A VAE decodes it quickly.
at::Tensor wan_small_frame(const at::Tensor& latents);

}  // namespace ditfleet::pipeline
