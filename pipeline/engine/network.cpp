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

at::Tensor guided_velocity(Denoiser& denoiser, std::int64_t step, const at::Tensor& latents, bool two_forwards,
                           const parallel::Team& team) {
  if (!two_forwards) return denoiser.velocity(step, latents, /*negative=*/false, team);
  const auto [positive, negative] = team.both(
      [&](bool second, const parallel::Team& ranks) { return denoiser.velocity(step, latents, second, ranks); });
  return denoiser.guide(positive, negative, step);
}

}  // namespace ditfleet::pipeline
