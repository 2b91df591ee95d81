#include "pipeline/families/flux/steps.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/cat.h>

#include <algorithm>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/rope.h"
#include "pipeline/sampling/latents.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kPreviewSide = 32;  // latent pixels on a preview's long side

using Clock = std::chrono::steady_clock;

// One picture under way.
struct Sample {
  std::size_t index;  // in the batch
  FluxPrepared* picture;
  const FluxTransformer* flux;
  at::Tensor tokens = {}, velocity = {};

  Conditioning& prompt() const { return *picture->conditioning; }
  Conditioning& negative() const { return *picture->negative_conditioning; }
};
using ConditioningOf = Conditioning& (Sample::*)() const;

template <class Part>
at::Tensor joined(const std::vector<Sample>& samples, Part part) {
  if (samples.size() == 1) return part(samples.front());
  std::vector<at::Tensor> parts;
  for (const Sample& sample : samples) parts.push_back(part(sample));
  return at::cat(parts, 0);
}

at::Tensor joined_text(const std::vector<Sample>& samples, ConditioningOf which) {
  return joined(samples, [&](const Sample& sample) { return (sample.*which)().text; });
}

StepModulation joined_rows(const std::vector<Sample>& samples, ConditioningOf which, std::int64_t step,
                           const FluxSlots& slots) {
  const auto rows = [&](const Sample& sample) {
    const FluxPrepared& p = *sample.picture;
    return rows_of((sample.*which)(), *sample.flux, step, p.timesteps, p.request.guidance_scale);
  };
  if (samples.size() == 1) return rows(samples.front());
  return ModulationTable::views(joined(samples, [&](const Sample& sample) { return rows(sample).all; }),
                                slots.double_blocks.size(), slots.single_blocks.size());
}

Image preview(const FluxFolder& folder, Placement placement, const FluxPrepared& p, const at::Tensor& estimate) {
  at::Tensor latents = unpack_latents(estimate.to(placement.dtype), p.rows, p.columns);
  const std::int64_t h = latents.size(2), w = latents.size(3), longest = std::max(h, w);
  if (longest > kPreviewSide)
    latents = at::adaptive_avg_pool2d(latents, {std::max<std::int64_t>(1, h * kPreviewSide / longest),
                                                std::max<std::int64_t>(1, w * kPreviewSide / longest)});
  const at::Tensor decoded = folder.vae.decode(latents);
  if (!are_finite({decoded})[0]) fail(Code::kDataCorrupt, "the picture so far holds NaN or infinity");
  return to_image(unit_range(decoded));
}

class Loop {
 public:
  Loop(const FluxFolder& folder, Placement placement, const std::vector<StepCallback>& on_step,
       const std::function<void()>& wait, std::vector<Result<void>>& results)
      : folder_(folder), placement_(placement), on_step_(on_step), wait_(wait), results_(results) {}

  void run(std::vector<Sample> samples) {
    live_ = std::move(samples);
    const FluxPrepared& first = *live_.front().picture;
    rope_ =
        rope_table(live_.front().flux->config(), first.prompt.tokens.size(1), first.rows, first.columns, placement_);
    for (Sample& sample : live_) sample.tokens = pack_latents(sample.picture->noise).to(placement_.device);
    const std::int64_t steps = first.timesteps.size(0);
    bool changed = true;
    for (std::int64_t i = 0; i < steps && !live_.empty(); ++i) {
      if (std::exchange(changed, false)) gather();
      step(i);
      wait_();
      const auto ended =
          std::remove_if(live_.begin(), live_.end(), [&](const Sample& sample) { return !goes_on(sample, i, steps); });
      changed = ended != live_.end();
      live_.erase(ended, live_.end());
    }
    for (const Sample& sample : live_) sample.picture->latents = sample.tokens;
  }

 private:
  // What all steps share, for those that are left.
  void gather() {
    std::vector<const FluxTransformer*> each;
    for (const Sample& sample : live_) each.push_back(sample.flux);
    flux_.emplace(FluxTransformer::together(each));
    flux_->load_adapters();
    text_ = joined_text(live_, &Sample::prompt);
    if (live_.front().picture->negative) negative_text_ = joined_text(live_, &Sample::negative);
  }

  void step(std::int64_t i) {
    const at::Tensor tokens = joined(live_, [](const Sample& sample) { return sample.tokens; });
    const at::Tensor velocity =
        flux_->velocity(tokens, text_, joined_rows(live_, &Sample::prompt, i, flux_->slots()), rope_);
    const bool guided = live_.front().picture->negative.has_value();
    const at::Tensor negative =
        guided
            ? flux_->velocity(tokens, negative_text_, joined_rows(live_, &Sample::negative, i, flux_->slots()), rope_)
            : at::Tensor();
    for (std::size_t s = 0; s < live_.size(); ++s) {
      Sample& sample = live_[s];
      const auto mine = [&](const at::Tensor& all) {
        return live_.size() == 1 ? all : all.narrow(0, static_cast<std::int64_t>(s), 1);
      };
      sample.velocity = mine(velocity);
      if (guided)
        sample.velocity = mine(negative) + sample.picture->request.true_cfg_scale * (sample.velocity - mine(negative));
      const at::Tensor& sigmas = sample.picture->sigmas;
      sample.tokens = euler_step(sample.tokens, sample.velocity, sigmas[i], sigmas[i + 1]);
    }
  }

  bool goes_on(const Sample& sample, std::int64_t i, std::int64_t steps) {
    const StepCallback& on_step = on_step_[sample.index];
    if (!on_step) return true;
    StepProgress progress;
    progress.step = static_cast<int>(i + 1);
    progress.total = static_cast<int>(steps);
    progress.preview = [&]() -> Result<Image> {
      try {
        return preview(folder_, placement_, *sample.picture,
                       sample.tokens - sample.picture->sigmas[i + 1] * sample.velocity);
      } catch (...) {
        return error_in_flight("preview");
      }
    };
    if (on_step(progress)) return true;
    results_[sample.index] =
        Error{Code::kCanceled, "canceled after step " + std::to_string(i + 1) + " of " + std::to_string(steps), {}};
    return false;
  }

  const FluxFolder& folder_;
  const Placement placement_;
  const std::vector<StepCallback>& on_step_;
  const std::function<void()>& wait_;
  std::vector<Result<void>>& results_;
  std::vector<Sample> live_;
  at::Tensor rope_, text_, negative_text_;
  std::optional<FluxTransformer> flux_;
};

void must_be_alike(const FluxPrepared& a, const FluxPrepared& b) {
  const auto same = [](const char* what, auto x, auto y) {
    if (x != y)
      fail(Code::kInvalidArgument, std::string("pictures of one batch must have the same ") + what + "; they have " +
                                       std::to_string(x) + " and " + std::to_string(y));
  };
  same("width", a.request.width, b.request.width);
  same("height", a.request.height, b.request.height);
  same("num_inference_steps", a.schedule.timesteps.size(), b.schedule.timesteps.size());
  same("max_sequence_length", a.request.max_sequence_length, b.request.max_sequence_length);
  same("use of true CFG (1: with)", a.negative.has_value(), b.negative.has_value());
}

}  // namespace

std::vector<Result<void>> run_steps(const FluxFolder& folder, Placement placement,
                                    const std::vector<FluxPrepared*>& batch, const std::vector<StepCallback>& on_step,
                                    const std::function<void()>& wait) {
  std::vector<Result<void>> results(batch.size());
  std::vector<Sample> samples;
  std::vector<const FluxTransformer*> each;
  const auto begun = Clock::now();
  for (std::size_t i = 0; i < batch.size(); ++i) {
    must_be_alike(*batch.front(), *batch[i]);
    const FluxTransformer& flux = batch[i]->adapted ? batch[i]->adapted->transformer : folder.transformer;
    each.push_back(&flux);
    samples.push_back({.index = i, .picture = batch[i], .flux = &flux});
  }
  if (FluxTransformer::run_together(each, batch.front()->rows * batch.front()->columns))
    Loop(folder, placement, on_step, wait, results).run(std::move(samples));
  else
    for (Sample& one : samples) Loop(folder, placement, on_step, wait, results).run({std::move(one)});
  for (FluxPrepared* picture : batch) picture->add_phase("denoise", begun);
  return results;
}

}  // namespace ditfleet::pipeline
