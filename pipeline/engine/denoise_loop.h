// The denoising loop of all families: a denoiser predicts velocities, a sampler turns them into the next latents.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "pipeline/api/model.h"
#include "pipeline/sampling/sampler.h"

namespace ditfleet::pipeline {

class Denoiser {
 public:
  virtual ~Denoiser() = default;
  // The guided velocity, with the shape of `latents`. Different steps may use different networks.
  virtual at::Tensor velocity(std::int64_t step, const at::Tensor& latents) = 0;
};

struct DenoiseHooks {
  const StepCallback& on_step;                               // may be null
  std::function<Media(const at::Tensor& estimate)> preview;  // of estimated latents; may throw
  std::function<void()> wait;                                // waits for the device; called after each step
};

// Runs `steps` steps from the noise and returns the latents. kCanceled if on_step returned false. Throws Failure and
// what LibTorch throws.
Result<at::Tensor> denoise_loop(Denoiser& denoiser, Sampler& sampler, at::Tensor noise, std::int64_t steps,
                                const DenoiseHooks& hooks);

}  // namespace ditfleet::pipeline
