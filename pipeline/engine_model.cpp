#include "pipeline/engine_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>

#include "pipeline/device/failure.h"
#include "pipeline/models/flux/rope.h"
#include "pipeline/sampling/latents.h"
#include "shared/core/bytes.h"

namespace ditfleet::pipeline {
namespace {

constexpr int kMaxSide = 16384, kMaxSteps = 1000;
constexpr int kMaxSequenceLength = 512;      // as in diffusers
constexpr std::size_t kCachedPrompts = 8;
constexpr std::size_t kMaxLoras = 16;  // of one request
constexpr std::int64_t kModulationSteps = 64;  // steps whose modulation is computed at once: bounds its memory
constexpr std::int64_t kPreviewSide = 32;      // latent pixels on a preview's long side

using Clock = std::chrono::steady_clock;

FluxPrepared& own(Prepared& prepared) {
  auto* mine = dynamic_cast<FluxPrepared*>(&prepared);
  if (!mine) fail(Code::kInternal, "this Prepared was made by another kind of model");
  return *mine;
}

void refuse(const std::string& field, const std::string& message) {
  fail(Code::kInvalidArgument, field + " " + message, field);
}

void check_range(const std::string& field, int value, int least, int most) {
  if (value < least || value > most)
    refuse(field, "is " + std::to_string(value) + "; it must be from " + std::to_string(least) + " to " + std::to_string(most));
}

}  // namespace

FluxModel::FluxModel(ModelInfo info, Placement placement, FluxFolder folder, Prompts prompts, AdapterStore::Limits adapters)
    : info_(std::move(info)), placement_(placement), folder_(std::move(folder)), prompts_(std::move(prompts)),
      adapters_(lora_base(folder_), placement, adapters) {}

void FluxModel::check(const ImageRequest& r) const {
  for (const auto& [field, value] : {std::pair("width", r.width), std::pair("height", r.height)}) {
    check_range(field, value, info_.size_multiple, kMaxSide);
    if (value % info_.size_multiple != 0)
      refuse(field, "is " + std::to_string(value) + "; this model takes multiples of " + std::to_string(info_.size_multiple));
  }
  check_range("num_inference_steps", r.num_inference_steps, 1, kMaxSteps);
  check_range("max_sequence_length", r.max_sequence_length, 1, kMaxSequenceLength);
  if (!std::isfinite(r.guidance_scale)) refuse("guidance_scale", "must be a finite number");
  if (!std::isfinite(r.true_cfg_scale)) refuse("true_cfg_scale", "must be a finite number");
  if (!is_valid_utf8(r.prompt)) refuse("prompt", "is not valid UTF-8");
  if (r.negative_prompt && !is_valid_utf8(*r.negative_prompt)) refuse("negative_prompt", "is not valid UTF-8");
  if (r.loras.size() > kMaxLoras)
    refuse("loras", "has " + std::to_string(r.loras.size()) + " entries; at most " + std::to_string(kMaxLoras) + " are allowed");
  for (const LoraRequest& lora : r.loras)
    if (!std::isfinite(lora.scale)) refuse("loras", "gives " + lora.path + " a scale that is not a finite number");
}

TextEmbedding FluxModel::embed(const std::string& prompt, int max_sequence_length, const AdaptedModels* adapted) {
  const std::string adapters = adapted ? adapted->text_key : "";
  {
    std::lock_guard lock(cache_mutex_);
    for (auto it = cache_.begin(); it != cache_.end(); ++it)
      if (it->prompt == prompt && it->max_sequence_length == max_sequence_length && it->adapters == adapters) {
        cache_.splice(cache_.begin(), cache_, it);
        return it->text;
      }
  }
  PromptIds ids = prompts_.ids(prompt, max_sequence_length);
  TextEmbedding text;
  text.pooled = (adapted ? adapted->clip : folder_.clip).pooled(ids.clip);
  text.tokens = (adapted ? adapted->t5 : folder_.t5).encode(ids.t5);
  text.clip_ids = std::move(ids.clip);
  text.t5_ids = std::move(ids.t5);
  text.warnings = std::move(ids.warnings);
  std::lock_guard lock(cache_mutex_);
  cache_.push_front({prompt, max_sequence_length, adapters, text});
  if (cache_.size() > kCachedPrompts) cache_.pop_back();
  return text;
}

Result<std::unique_ptr<Prepared>> FluxModel::encode(const ImageRequest& request) {
  try {
    const auto start = Clock::now();
    check(request);
    StageScope scope(placement_.device);
    auto p = std::make_unique<FluxPrepared>();
    p->request = request;
    p->adapted = adapt(folder_, adapters_, request.loras);
    p->prompt = embed(request.prompt, request.max_sequence_length, p->adapted.get());
    p->warnings_ = p->prompt.warnings;
    if (request.true_cfg_scale > 1 && request.negative_prompt) {
      p->negative = embed(*request.negative_prompt, request.max_sequence_length, p->adapted.get());
      for (const auto& warning : p->negative->warnings) p->warnings_.push_back("negative " + warning);
    }
    p->rows = request.height / info_.size_multiple;
    p->columns = request.width / info_.size_multiple;
    p->noise = draw_noise(request.seed, folder_.transformer.config().in_channels / 4, 2 * p->rows, 2 * p->columns,
                          placement_.dtype);
    p->schedule = make_schedule(folder_.scheduler, request.num_inference_steps, p->rows * p->columns);
    for (float sigma : p->schedule.sigmas)
      if (!std::isfinite(sigma))  // shift_terminal divides 0 by 0 where there is but one step
        refuse("num_inference_steps", "is " + std::to_string(request.num_inference_steps) +
                                          ", of which this model's scheduler makes no schedule; use 2 or more");
    scope.finish();
    p->add_phase("text", start);
    return std::unique_ptr<Prepared>(std::move(p));
  } catch (...) {
    const Error error = error_in_flight("encode");
    if (error.code == Code::kOutOfMemory) release_cached_memory(placement_.device);
    return error;
  }
}

void FluxModel::run_steps(FluxPrepared& p, const StepCallback& on_step, const std::function<void()>& wait) {
  const FluxTransformer& flux = p.adapted ? p.adapted->transformer : folder_.transformer;
  const auto device = placement_.device;
  // What adapters a compiled block reads is one for all of the model's.
  std::unique_lock one_at_a_time(adapted_, std::defer_lock);
  if (p.adapted) one_at_a_time.lock();
  flux.load_adapters();
  const auto on_device = [&](const std::vector<float>& values) {
    return at::from_blob(const_cast<float*>(values.data()), {static_cast<std::int64_t>(values.size())}).clone().to(device);
  };
  const at::Tensor sigmas = on_device(p.schedule.sigmas), timesteps = on_device(p.schedule.timesteps);
  const at::Tensor rope = rope_table(flux.config(), p.prompt.tokens.size(1), p.rows, p.columns, placement_);
  const at::Tensor text = flux.embed_text(p.prompt.tokens);
  const at::Tensor negative_text = p.negative ? flux.embed_text(p.negative->tokens) : at::Tensor();
  at::Tensor tokens = pack_latents(p.noise).to(device);
  const std::int64_t steps = timesteps.size(0);
  std::optional<ModulationTable> table, negative_table;
  for (std::int64_t i = 0; i < steps; ++i) {
    const std::int64_t row = i % kModulationSteps;
    if (row == 0) {
      const at::Tensor window = timesteps.slice(0, i, std::min(steps, i + kModulationSteps));
      table.emplace(flux.modulation(window, p.request.guidance_scale, p.prompt.pooled));
      if (p.negative) negative_table.emplace(flux.modulation(window, p.request.guidance_scale, p.negative->pooled));
    }
    at::Tensor velocity = flux.velocity(tokens, text, table->step(row), rope);
    if (p.negative) {
      const at::Tensor negative = flux.velocity(tokens, negative_text, negative_table->step(row), rope);
      velocity = negative + p.request.true_cfg_scale * (velocity - negative);
    }
    const at::Tensor next = sigmas[i + 1];
    tokens = euler_step(tokens, velocity, sigmas[i], next);
    wait();
    StepProgress progress;
    progress.step = static_cast<int>(i + 1);
    progress.total = static_cast<int>(steps);
    progress.preview = [&]() -> Result<Image> {
      try {
        return preview(p, tokens - next * velocity);
      } catch (...) {
        return error_in_flight("preview");
      }
    };
    if (on_step && !on_step(progress))
      fail(Code::kCanceled, "canceled after step " + std::to_string(i + 1) + " of " + std::to_string(steps));
  }
  p.latents = tokens;
}

Result<void> FluxModel::denoise(Prepared& prepared, const StepCallback& on_step) {
  try {
    const auto start = Clock::now();
    FluxPrepared& p = own(prepared);
    StageScope scope(placement_.device);
    run_steps(p, on_step, [&] { scope.finish(); });
    p.add_phase("denoise", start);
    return {};
  } catch (...) {
    const Error error = error_in_flight("denoise");
    if (error.code == Code::kOutOfMemory) release_cached_memory(placement_.device);
    return error;
  }
}

Result<void> FluxModel::prefetch(const std::vector<LoraRequest>& loras, const std::vector<std::string>& drop_first) {
  try {
    const StageScope scope(placement_.device);
    for (const LoraRequest& lora : loras) adapters_.prefetch(lora, drop_first);
    return {};
  } catch (...) {
    return error_in_flight("prefetch");
  }
}

void FluxModel::forget_adapter(const std::string& id) { adapters_.forget(id); }
AdapterHoldings FluxModel::adapters() const { return adapters_.holdings(); }

Image FluxModel::preview(const FluxPrepared& p, const at::Tensor& estimate) const {
  at::Tensor latents = unpack_latents(estimate.to(placement_.dtype), p.rows, p.columns);
  const std::int64_t h = latents.size(2), w = latents.size(3), longest = std::max(h, w);
  if (longest > kPreviewSide)
    latents = at::adaptive_avg_pool2d(latents, {std::max<std::int64_t>(1, h * kPreviewSide / longest),
                                                std::max<std::int64_t>(1, w * kPreviewSide / longest)});
  return to_image(unit_range(folder_.vae.decode(latents)));
}

Result<Image> FluxModel::decode(Prepared& prepared) {
  try {
    const auto start = Clock::now();
    FluxPrepared& p = own(prepared);
    if (!p.latents.defined()) fail(Code::kInternal, "[decode] denoise() has not been run");
    StageScope scope(placement_.device);
    p.image = unit_range(folder_.vae.decode(unpack_latents(p.latents, p.rows, p.columns)));
    Image image = to_image(p.image);
    scope.finish();
    p.add_phase("vae", start);
    return image;
  } catch (...) {
    const Error error = error_in_flight("decode");
    if (error.code == Code::kOutOfMemory) release_cached_memory(placement_.device);
    return error;
  }
}

}  // namespace ditfleet::pipeline
