// A cheap picture of Wan's latents, for previews.
#pragma once

#include <ATen/core/Tensor.h>

namespace ditfleet::pipeline {

// The middle frame of latents [1, C, frames, rows, columns] as [1, 3, rows, columns], about −1 to 1, on the host. Of a
// VAE with another number of channels than Wan's 16 it sees those that both have.
at::Tensor wan_preview(const at::Tensor& latents);

}  // namespace ditfleet::pipeline
