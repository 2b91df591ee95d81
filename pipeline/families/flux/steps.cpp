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
using Part = std::optional<Conditioning> FluxGeneration::*;

const FluxTransformer& transformer_of(const FluxFolder& folder, const FluxGeneration& generation) {
  return generation.adapted ? generation.adapted->transformer : folder.transformer;
}

at::Tensor joined(const std::vector<at::Tensor>& parts) { return parts.size() == 1 ? parts[0] : at::cat(parts, 0); }

// Generations that the transformer takes together.
class FluxDenoiser final : public Denoiser {
 public:
  FluxDenoiser(const FluxFolder& folder, Placement placement, std::vector<FluxGeneration*> batch)
      : folder_(folder), batch_(std::move(batch)) {
    const FluxGeneration& first = *batch_.front();
    rope_ = rope_table(folder.transformer.config(), first.prompt.tokens.size(1), first.rows, first.columns, placement);
  }

  void select(const std::vector<std::size_t>& samples) override {
    live_.clear();
    std::vector<const FluxTransformer*> each;
    for (const std::size_t i : samples) {
      live_.push_back(batch_[i]);
      each.push_back(&transformer_of(folder_, *batch_[i]));
    }
    flux_.emplace(FluxTransformer::together(each));
    flux_->load_adapters();
    text_ = joined_text(&FluxGeneration::conditioning);
    if (guided()) negative_text_ = joined_text(&FluxGeneration::negative_conditioning);
  }

  std::vector<at::Tensor> velocity(std::int64_t step, const std::vector<at::Tensor>& latents) override {
    const at::Tensor tokens = joined(latents);
    const at::Tensor all = flux_->velocity(tokens, text_, rows_at(step, &FluxGeneration::conditioning), rope_);
    const at::Tensor negative =
        guided() ? flux_->velocity(tokens, negative_text_, rows_at(step, &FluxGeneration::negative_conditioning), rope_)
                 : at::Tensor();
    std::vector<at::Tensor> velocities;
    for (std::size_t i = 0; i < live_.size(); ++i) {
      const auto own = [&](const at::Tensor& x) {
        return live_.size() == 1 ? x : x.narrow(0, static_cast<std::int64_t>(i), 1);
      };
      velocities.push_back(guided() ? own(negative) + live_[i]->request.true_cfg_scale * (own(all) - own(negative))
                                    : own(all));
    }
    return velocities;
  }

 private:
  bool guided() const { return live_.front()->negative.has_value(); }

  at::Tensor joined_text(Part part) const {
    std::vector<at::Tensor> texts;
    for (const FluxGeneration* one : live_) texts.push_back((one->*part)->text);
    return joined(texts);
  }

  StepModulation rows_at(std::int64_t step, Part part) const {
    std::vector<StepModulation> rows;
    for (FluxGeneration* one : live_)
      rows.push_back(
          rows_of(*(one->*part), transformer_of(folder_, *one), step, one->timesteps, one->request.guidance_scale));
    if (rows.size() == 1) return rows[0];
    std::vector<at::Tensor> all;
    for (const StepModulation& one : rows) all.push_back(one.all);
    const FluxSlots& slots = flux_->slots();
    return ModulationTable::views(at::cat(all, 0), slots.double_blocks.size(), slots.single_blocks.size());
  }

  const FluxFolder& folder_;
  const std::vector<FluxGeneration*> batch_;
  std::vector<FluxGeneration*> live_;
  at::Tensor rope_, text_, negative_text_;
  std::optional<FluxTransformer> flux_;
};

Media preview(const FluxFolder& folder, Placement placement, const FluxGeneration& p, const at::Tensor& estimate) {
  at::Tensor latents = unpack_latents(estimate.to(placement.dtype), p.rows, p.columns);
  const std::int64_t h = latents.size(2), w = latents.size(3), longest = std::max(h, w);
  if (longest > kPreviewSide)
    latents = at::adaptive_avg_pool2d(latents, {std::max<std::int64_t>(1, h * kPreviewSide / longest),
                                                std::max<std::int64_t>(1, w * kPreviewSide / longest)});
  const at::Tensor decoded = folder.vae.decode(latents);
  if (!are_finite({decoded})[0]) fail(Code::kDataCorrupt, "the image so far holds NaN or infinity");
  return to_media(unit_range(decoded));
}

void must_be_alike(const FluxGeneration& a, const FluxGeneration& b) {
  const auto same = [](const char* what, auto x, auto y) {
    if (x != y)
      fail(Code::kInvalidArgument, std::string("generations of one batch must have the same ") + what + "; they have " +
                                       std::to_string(x) + " and " + std::to_string(y));
  };
  same("width", a.request.width, b.request.width);
  same("height", a.request.height, b.request.height);
  same("num_inference_steps", a.schedule.timesteps.size(), b.schedule.timesteps.size());
  same("max_sequence_length", a.request.max_sequence_length, b.request.max_sequence_length);
  same("use of true CFG (1: with)", a.negative.has_value(), b.negative.has_value());
}

// The batch in common steps.
std::vector<Result<void>> run_together(const FluxFolder& folder, Placement placement,
                                       const std::vector<FluxGeneration*>& batch,
                                       const std::vector<const StepCallback*>& on_step,
                                       const std::function<void()>& wait) {
  std::vector<FlowMatchEuler> samplers;
  for (const FluxGeneration* one : batch) samplers.emplace_back(one->sigmas);
  std::vector<DenoiseSample> samples;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const FluxGeneration& one = *batch[i];
    samples.push_back({.latents = pack_latents(one.noise).to(placement.device),
                       .sampler = &samplers[i],
                       .on_step = on_step[i],
                       .preview = [&folder, &one, placement](const at::Tensor& estimate) {
                         return preview(folder, placement, one, estimate);
                       }});
  }
  FluxDenoiser denoiser(folder, placement, batch);
  denoise_loop(denoiser, samples, batch.front()->timesteps.size(0), wait);
  std::vector<Result<void>> results;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    if (samples[i].result) batch[i]->latents = samples[i].latents;
    results.push_back(samples[i].result);
  }
  return results;
}

}  // namespace

std::vector<Result<void>> run_steps(const FluxFolder& folder, Placement placement,
                                    const std::vector<FluxGeneration*>& batch, const std::vector<StepCallback>& on_step,
                                    const std::function<void()>& wait) {
  const auto begun = Clock::now();
  std::vector<const FluxTransformer*> each;
  std::vector<const StepCallback*> callbacks;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    must_be_alike(*batch.front(), *batch[i]);
    each.push_back(&transformer_of(folder, *batch[i]));
    callbacks.push_back(&on_step[i]);
  }
  std::vector<Result<void>> results;
  if (FluxTransformer::run_together(each, batch.front()->rows * batch.front()->columns))
    results = run_together(folder, placement, batch, callbacks, wait);
  else
    for (std::size_t i = 0; i < batch.size(); ++i)
      results.push_back(run_together(folder, placement, {batch[i]}, {callbacks[i]}, wait).front());
  for (FluxGeneration* one : batch) one->add_phase("denoise", begun);
  return results;
}

}  // namespace ditfleet::pipeline
