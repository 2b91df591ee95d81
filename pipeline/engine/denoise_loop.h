// The denoising loop of all families: a denoiser predicts velocities, a sampler turns them into the next latents.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "pipeline/api/model.h"
#include "pipeline/sampling/sampler.h"

namespace ditfleet::pipeline {

// Predicts velocities for a batch of samples, which share their sizes and number of steps.
class Denoiser {
 public:
  virtual ~Denoiser() = default;
  // From here on velocity() takes these samples, by their indices in the whole batch. Called before the first step and
  // whenever a sample was canceled.
  virtual void select(const std::vector<std::size_t>& samples) = 0;
  // The guided velocity of each selected sample, like its latents. It may come from another model at another step.
  virtual std::vector<at::Tensor> velocity(std::int64_t step, const std::vector<at::Tensor>& latents) = 0;
};

struct DenoiseSample {
  at::Tensor latents;  // in: noise; out: the result, if `result` is ok
  Sampler* sampler;
  const StepCallback* on_step;
  std::function<Media(const at::Tensor& estimate)> preview;  // of latents; may throw
  Result<void> result = {};
};

// `wait` waits for the device after each step. Throws what ends all samples: Failure, and what LibTorch throws.
void denoise_loop(Denoiser& denoiser, std::vector<DenoiseSample>& samples, std::int64_t steps,
                  const std::function<void()>& wait);

}  // namespace ditfleet::pipeline
