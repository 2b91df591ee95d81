#include "pipeline/engine/network.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "pipeline/sampling/latents.h"

namespace ditfleet::pipeline {

Conditions encode_conditions(const Network& network, const Settings& settings,
                             const std::function<EncodedPrompt(const std::string& prompt)>& embed) {
  Conditions made;
  const auto size = network.noise_size(settings);
  at::Tensor image_noise;
  const auto draw = [&](std::int64_t seed, int count) {
    if (!network.placement.device.is_meta()) return draw_noises(seed, size, network.noise_type(), count);
    const at::Tensor any = at::empty(size, at::TensorOptions(network.noise_type()).device(network.placement.device));
    return std::vector<at::Tensor>(static_cast<std::size_t>(count), any);
  };
  if (!network.samples_image(settings)) {
    made.noise = draw(settings.seed, 1)[0];
  } else if (settings.number == 0) {
    const auto drawn = draw(settings.seed, 2);
    image_noise = drawn[0];
    made.noise = drawn[1];
  } else {
    image_noise = draw(settings.seed - settings.number, 1)[0];
    made.noise = draw(settings.seed, 1)[0];
  }
  made.image = network.encode_image(settings, image_noise);
  made.image_embeds = network.embed_image(settings);
  made.prompt = embed(settings.prompt);
  if (settings.negative) made.negative = embed(*settings.negative);
  return made;
}

BlockCache& BlockCaches::of(std::size_t expert, bool negative) {
  if (std::exchange(expert_, expert) != expert) caches_.clear();
  return caches_.try_emplace(negative, threshold_).first->second;
}

void BlockCaches::visit(RunState& state) {
  auto expert = static_cast<std::int64_t>(expert_);
  state.number("cache.expert", expert);
  expert_ = static_cast<std::size_t>(expert);
  for (const bool negative : {false, true}) {
    const std::string name = negative ? "cache.negative" : "cache.positive";
    std::int64_t there = caches_.contains(negative);
    state.number(name, there);
    if (there != 0) caches_.try_emplace(negative, threshold_).first->second.visit(state, name);
  }
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
