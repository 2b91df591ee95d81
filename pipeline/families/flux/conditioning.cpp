#include "pipeline/families/flux/conditioning.h"

#include <algorithm>

namespace ditfleet::pipeline {
namespace {

ModulationTable window(const FluxTransformer& flux, std::int64_t first, const at::Tensor& timesteps, double guidance,
                       const at::Tensor& pooled) {
  return flux.modulation(timesteps.slice(0, first, std::min(timesteps.size(0), first + kModulationSteps)), guidance,
                         pooled);
}

}  // namespace

Conditioning make_conditioning(const FluxTransformer& flux, const at::Tensor& tokens, const at::Tensor& pooled,
                               const at::Tensor& timesteps, double guidance) {
  return {flux.embed_text(tokens), pooled, window(flux, 0, timesteps, guidance, pooled), 0};
}

StepModulation rows_of(Conditioning& conditioning, const FluxTransformer& flux, std::int64_t step,
                       const at::Tensor& timesteps, double guidance) {
  const std::int64_t first = step / kModulationSteps * kModulationSteps;
  if (first != conditioning.first_step) {
    conditioning.modulation = window(flux, first, timesteps, guidance, conditioning.pooled);
    conditioning.first_step = first;
  }
  return conditioning.modulation.step(step - conditioning.first_step);
}

}  // namespace ditfleet::pipeline
