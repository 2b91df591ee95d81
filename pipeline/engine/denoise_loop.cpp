#include "pipeline/engine/denoise_loop.h"

#include <string>
#include <utility>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {

Result<at::Tensor> denoise_loop(Denoiser& denoiser, Sampler& sampler, at::Tensor noise, std::int64_t steps,
                                const DenoiseHooks& hooks) {
  at::Tensor latents = std::move(noise);
  for (std::int64_t step = 0; step < steps; ++step) {
    const at::Tensor velocity = denoiser.velocity(step, latents);
    latents = sampler.step(latents, velocity, step);
    hooks.wait();
    if (!hooks.on_step) continue;
    StepProgress progress;
    progress.step = static_cast<int>(step + 1);
    progress.total = static_cast<int>(steps);
    progress.preview = [&]() -> Result<Media> {
      try {
        return hooks.preview(sampler.estimate(latents, velocity, step));
      } catch (...) {
        return error_in_flight("preview");
      }
    };
    if (!hooks.on_step(progress))
      return Error{Code::kCanceled, "canceled after step " + std::to_string(step + 1) + " of " + std::to_string(steps)};
  }
  return latents;
}

}  // namespace ditfleet::pipeline
