#include "pipeline/families/flux/steps.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/cat.h>

#include <algorithm>

#include "pipeline/device/failure.h"
#include "pipeline/engine/denoise_loop.h"
#include "pipeline/families/flux/rope.h"
#include "pipeline/sampling/latents.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kPreviewSide = 32;  // latent pixels on a preview's long side

using Clock = std::chrono::steady_clock;
class FluxDenoiser final : public Denoiser {
 public:
  FluxDenoiser(const FluxTransformer& flux, Placement placement, FluxGeneration& generation)
      : flux_(flux), generation_(generation) {
    rope_ = rope_table(flux.config(), generation.prompt.tokens.size(1), generation.rows, generation.columns, placement);
  }

  at::Tensor velocity(std::int64_t step, const at::Tensor& latents) override {
    const auto forward = [&](bool negative, const parallel::Team& ranks) {
      return velocity_of(negative ? *generation_.negative_conditioning : *generation_.conditioning, step, latents,
                         ranks);
    };
    const parallel::Team team = generation_.alone ? parallel::Team() : flux_.team();
    return team.velocity(forward,
                         generation_.negative ? std::optional(generation_.request.true_cfg_scale) : std::nullopt);
  }

 private:
  at::Tensor velocity_of(Conditioning& conditioning, std::int64_t step, const at::Tensor& latents,
                         const parallel::Team& ranks) const {
    const StepModulation rows =
        rows_of(conditioning, flux_, step, generation_.timesteps, generation_.request.guidance_scale);
    return flux_.velocity(latents, conditioning.text, rows, rope_, ranks);
  }

  const FluxTransformer& flux_;
  FluxGeneration& generation_;
  at::Tensor rope_;
};

Media preview(const FluxFolder& folder, Placement placement, const FluxGeneration& p, const at::Tensor& estimate) {
  at::Tensor latents = unpack_latents(estimate.to(placement.dtype), p.rows, p.columns);
  const std::int64_t h = latents.size(2), w = latents.size(3), longest = std::max(h, w);
  if (longest > kPreviewSide)
    latents = at::adaptive_avg_pool2d(latents, {std::max<std::int64_t>(1, h * kPreviewSide / longest),
                                                std::max<std::int64_t>(1, w * kPreviewSide / longest)});
  const at::Tensor decoded = folder.vae.decode(latents);
  if (!are_finite({decoded})[0]) fail(Code::kDataCorrupt, "the current estimate contains NaN or infinity");
  return to_media(unit_range(decoded));
}

}  // namespace

Result<void> run_steps(FluxFolder& folder, Placement placement, FluxGeneration& p, const StepCallback& on_step,
                       const std::function<void()>& wait) {
  const auto begun = Clock::now();
  const std::shared_ptr<PartSequence> blocks = folder.transformer.parts().blocks;
  const std::shared_ptr<void> finish(nullptr, [&](void*) { blocks->finish(); });
  if (p.adapted) p.adapted->transformer.load_adapters();
  FluxDenoiser denoiser(p.adapted ? p.adapted->transformer : folder.transformer, placement, p);
  FlowMatchEuler sampler(p.sigmas);
  auto latents = denoise_loop(
      denoiser, sampler, pack_latents(p.noise).to(placement.device), p.timesteps.size(0),
      {on_step, [&](const at::Tensor& estimate) { return preview(folder, placement, p, estimate); }, wait});
  p.add_phase("denoise", begun);
  if (!latents) return latents.error();
  p.latents = std::move(*latents);
  return {};
}

}  // namespace ditfleet::pipeline
