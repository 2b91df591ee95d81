#include "pipeline/engine/network.h"

#include <utility>

namespace ditfleet::pipeline {

Conditions encode_conditions(const Network& network, const Settings& settings,
                             const std::function<EncodedPrompt(const std::string& prompt)>& embed) {
  Conditions made;
  made.image = network.encode_image(settings);
  made.prompt = embed(settings.prompt);
  if (settings.negative) made.negative = embed(*settings.negative);
  return made;
}

BlockCache& BlockCaches::of(std::size_t expert, bool negative) {
  if (std::exchange(expert_, expert) != expert) caches_.clear();
  return caches_.try_emplace(negative, threshold_).first->second;
}

at::Tensor guided_velocity(Denoiser& denoiser, std::int64_t step, const at::Tensor& latents, bool two_forwards,
                           const parallel::Team& team, BlockCaches* caches) {
  const auto forward = [&](bool negative, const parallel::Team& ranks) {
    return denoiser.velocity(step, latents, negative, ranks,
                             caches ? &caches->of(denoiser.expert(step), negative) : nullptr);
  };
  if (!two_forwards || !denoiser.guides(step)) return forward(false, team);
  if (caches && team.count > 2) {
    const at::Tensor positive = forward(false, team);
    return denoiser.guide(positive, forward(true, team), step);
  }
  const auto [positive, negative] = team.both(forward);
  return denoiser.guide(positive, negative, step);
}

}  // namespace ditfleet::pipeline
