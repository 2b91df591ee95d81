#include "pipeline/engine_steps.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "pipeline/device/failure.h"
#include "pipeline/models/flux/rope.h"
#include "pipeline/sampling/latents.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kModulationSteps = 64;  // steps whose modulation is computed at once: bounds its memory
constexpr std::int64_t kPreviewSide = 32;      // latent pixels on a preview's long side

using Clock = std::chrono::steady_clock;

// One picture under way.
struct Sample {
  std::size_t index;  // in the batch
  FluxPrepared* picture;
  const FluxTransformer* flux;
  at::Tensor sigmas, timesteps, text, negative_text, tokens, velocity;
  std::optional<ModulationTable> table, negative_table;
};

at::Tensor joined(const std::vector<Sample>& samples, at::Tensor Sample::*part) {
  if (samples.size() == 1) return samples.front().*part;
  std::vector<at::Tensor> parts;
  for (const Sample& sample : samples) parts.push_back(sample.*part);
  return at::cat(parts, 0);
}

StepModulation joined(const std::vector<Sample>& samples, std::optional<ModulationTable> Sample::*table, std::int64_t row, const FluxSlots& slots) {
  if (samples.size() == 1) return (samples.front().*table)->step(row);
  std::vector<at::Tensor> rows;
  for (const Sample& sample : samples) rows.push_back((sample.*table)->step(row).all);
  return ModulationTable::views(at::cat(rows, 0), slots.double_blocks.size(), slots.single_blocks.size());
}

Image preview(const FluxFolder& folder, Placement placement, const FluxPrepared& p, const at::Tensor& estimate) {
  at::Tensor latents = unpack_latents(estimate.to(placement.dtype), p.rows, p.columns);
  const std::int64_t h = latents.size(2), w = latents.size(3), longest = std::max(h, w);
  if (longest > kPreviewSide)
    latents = at::adaptive_avg_pool2d(latents, {std::max<std::int64_t>(1, h * kPreviewSide / longest), std::max<std::int64_t>(1, w * kPreviewSide / longest)});
  return to_image(unit_range(folder.vae.decode(latents)));
}

class Loop {
 public:
  Loop(const FluxFolder& folder, Placement placement, const std::vector<StepCallback>& on_step, const std::function<void()>& wait, std::vector<Result<void>>& results)
      : folder_(folder), placement_(placement), on_step_(on_step), wait_(wait), results_(results) {}

  void run(std::vector<Sample> samples) {
    live_ = std::move(samples);
    const FluxPrepared& first = *live_.front().picture;
    rope_ = rope_table(live_.front().flux->config(), first.prompt.tokens.size(1), first.rows, first.columns, placement_);
    for (Sample& sample : live_) begin(sample);
    const std::int64_t steps = live_.front().timesteps.size(0);
    bool changed = true;
    for (std::int64_t i = 0; i < steps && !live_.empty(); ++i) {
      if (std::exchange(changed, false)) gather();
      step(i, steps);
      wait_();
      const auto ended = std::remove_if(live_.begin(), live_.end(), [&](const Sample& sample) { return !goes_on(sample, i, steps); });
      changed = ended != live_.end();
      live_.erase(ended, live_.end());
    }
    for (const Sample& sample : live_) sample.picture->latents = sample.tokens;
  }

 private:
  at::Tensor on_device(const std::vector<float>& values) const {
    return at::from_blob(const_cast<float*>(values.data()), {static_cast<std::int64_t>(values.size())}).clone().to(placement_.device);
  }

  void begin(Sample& sample) const {
    const FluxPrepared& p = *sample.picture;
    sample.sigmas = on_device(p.schedule.sigmas);
    sample.timesteps = on_device(p.schedule.timesteps);
    sample.text = sample.flux->embed_text(p.prompt.tokens);
    if (p.negative) sample.negative_text = sample.flux->embed_text(p.negative->tokens);
    sample.tokens = pack_latents(p.noise).to(placement_.device);
  }

  // What all steps share, for those that are left.
  void gather() {
    std::vector<const FluxTransformer*> each;
    for (const Sample& sample : live_) each.push_back(sample.flux);
    flux_.emplace(FluxTransformer::together(each));
    flux_->load_adapters();
    text_ = joined(live_, &Sample::text);
    if (live_.front().picture->negative) negative_text_ = joined(live_, &Sample::negative_text);
  }

  void step(std::int64_t i, std::int64_t steps) {
    const std::int64_t row = i % kModulationSteps;
    for (Sample& sample : live_) {
      if (row != 0) break;
      const FluxPrepared& p = *sample.picture;
      const at::Tensor window = sample.timesteps.slice(0, i, std::min(steps, i + kModulationSteps));
      sample.table.emplace(sample.flux->modulation(window, p.request.guidance_scale, p.prompt.pooled));
      if (p.negative) sample.negative_table.emplace(sample.flux->modulation(window, p.request.guidance_scale, p.negative->pooled));
    }
    const at::Tensor tokens = joined(live_, &Sample::tokens);
    const at::Tensor velocity = flux_->velocity(tokens, text_, joined(live_, &Sample::table, row, flux_->slots()), rope_);
    const bool guided = live_.front().picture->negative.has_value();
    const at::Tensor negative = guided ? flux_->velocity(tokens, negative_text_, joined(live_, &Sample::negative_table, row, flux_->slots()), rope_) : at::Tensor();
    for (std::size_t s = 0; s < live_.size(); ++s) {
      Sample& sample = live_[s];
      const auto mine = [&](const at::Tensor& all) { return live_.size() == 1 ? all : all.narrow(0, static_cast<std::int64_t>(s), 1); };
      sample.velocity = mine(velocity);
      if (guided) sample.velocity = mine(negative) + sample.picture->request.true_cfg_scale * (sample.velocity - mine(negative));
      sample.tokens = euler_step(sample.tokens, sample.velocity, sample.sigmas[i], sample.sigmas[i + 1]);
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
        return preview(folder_, placement_, *sample.picture, sample.tokens - sample.sigmas[i + 1] * sample.velocity);
      } catch (...) {
        return error_in_flight("preview");
      }
    };
    if (on_step(progress)) return true;
    results_[sample.index] = Error{Code::kCanceled, "canceled after step " + std::to_string(i + 1) + " of " + std::to_string(steps), {}};
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
    if (x != y) fail(Code::kInvalidArgument, std::string("pictures of one batch must have the same ") + what + "; they have " + std::to_string(x) + " and " + std::to_string(y));
  };
  same("width", a.request.width, b.request.width);
  same("height", a.request.height, b.request.height);
  same("num_inference_steps", a.schedule.timesteps.size(), b.schedule.timesteps.size());
  same("max_sequence_length", a.request.max_sequence_length, b.request.max_sequence_length);
  same("use of true CFG (1: with)", a.negative.has_value(), b.negative.has_value());
}

}  // namespace

std::vector<Result<void>> run_steps(const FluxFolder& folder, Placement placement, const std::vector<FluxPrepared*>& batch, const std::vector<StepCallback>& on_step,
                                    const std::function<void()>& wait) {
  std::vector<Result<void>> results(batch.size());
  std::vector<Sample> samples;
  bool together = true;
  const auto begun = Clock::now();
  for (std::size_t i = 0; i < batch.size(); ++i) {
    must_be_alike(*batch.front(), *batch[i]);
    const FluxTransformer& flux = batch[i]->adapted ? batch[i]->adapted->transformer : folder.transformer;
    together = together && flux.runs_batches(batch[i]->rows * batch[i]->columns);
    samples.push_back({.index = i, .picture = batch[i], .flux = &flux, .sigmas = {}, .timesteps = {}, .text = {}, .negative_text = {}, .tokens = {}, .velocity = {}, .table = {}, .negative_table = {}});
  }
  if (together) Loop(folder, placement, on_step, wait, results).run(std::move(samples));
  else
    for (Sample& one : samples) Loop(folder, placement, on_step, wait, results).run({std::move(one)});
  for (FluxPrepared* picture : batch) picture->add_phase("denoise", begun);
  return results;
}

}  // namespace ditfleet::pipeline
