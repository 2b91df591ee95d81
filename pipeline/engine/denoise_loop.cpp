#include "pipeline/engine/denoise_loop.h"

#include <string>
#include <utility>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {
namespace {

// Reports the step. False: the sample was canceled.
bool report(DenoiseSample& sample, const at::Tensor& velocity, std::int64_t step, std::int64_t steps) {
  if (!*sample.on_step) return true;
  StepProgress progress;
  progress.step = static_cast<int>(step + 1);
  progress.total = static_cast<int>(steps);
  progress.preview = [&]() -> Result<Media> {
    try {
      return sample.preview(sample.sampler->estimate(sample.latents, velocity, step));
    } catch (...) {
      return error_in_flight("preview");
    }
  };
  if ((*sample.on_step)(progress)) return true;
  sample.result =
      Error{Code::kCanceled, "canceled after step " + std::to_string(step + 1) + " of " + std::to_string(steps), {}};
  return false;
}

}  // namespace

void denoise_loop(Denoiser& denoiser, std::vector<DenoiseSample>& samples, std::int64_t steps,
                  const std::function<void()>& wait) {
  std::vector<std::size_t> live;
  for (std::size_t i = 0; i < samples.size(); ++i) live.push_back(i);
  denoiser.select(live);
  for (std::int64_t step = 0; step < steps && !live.empty(); ++step) {
    std::vector<at::Tensor> latents;
    for (const std::size_t i : live) latents.push_back(samples[i].latents);
    const std::vector<at::Tensor> velocities = denoiser.velocity(step, latents);
    for (std::size_t s = 0; s < live.size(); ++s) {
      DenoiseSample& sample = samples[live[s]];
      sample.latents = sample.sampler->step(sample.latents, velocities[s], step);
    }
    wait();
    std::vector<std::size_t> left;
    for (std::size_t s = 0; s < live.size(); ++s)
      if (report(samples[live[s]], velocities[s], step, steps)) left.push_back(live[s]);
    if (left.size() == live.size()) continue;
    live = std::move(left);
    if (!live.empty()) denoiser.select(live);
  }
}

}  // namespace ditfleet::pipeline
