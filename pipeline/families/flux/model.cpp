#include "pipeline/families/flux/model.h"

#include <ATen/ops/from_blob.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/steps.h"
#include "pipeline/sampling/latents.h"
#include "shared/core/bytes.h"

namespace ditfleet::pipeline {
namespace {

constexpr int kMaxSide = 16384, kMaxSteps = 1000;
constexpr int kMaxSequenceLength = 512;  // as in diffusers
constexpr std::size_t kCachedPrompts = 8;
constexpr std::size_t kMaxLoras = 16;  // of one request

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
    refuse(field, "is " + std::to_string(value) + "; it must be from " + std::to_string(least) + " to " +
                      std::to_string(most));
}

// "100 and 0.5"
std::string strengths(const std::vector<LoraRequest>& loras) {
  std::string text;
  for (std::size_t i = 0; i < loras.size(); ++i) {
    std::array<char, 32> number;
    std::snprintf(number.data(), number.size(), "%g", loras[i].scale);
    text += (i == 0 ? "" : i + 1 == loras.size() ? " and " : ", ") + std::string(number.data());
  }
  return text;
}

// The request asked for something that this model's numbers do not hold.
[[noreturn]] void no_picture(const ImageRequest& request, const std::string& what) {
  const bool adapted =
      std::any_of(request.loras.begin(), request.loras.end(), [](const LoraRequest& lora) { return lora.scale != 0; });
  if (adapted)
    fail(Code::kInvalidArgument,
         "[decode] " + what + " hold NaN or infinity, with adapters at the strengths " + strengths(request.loras) +
             " (in the request's order); smaller ones would do, or another adapter",
         "loras");
  fail(Code::kDataCorrupt,
       "[decode] " + what +
           " hold NaN or infinity; the model's weights or its precision (worker.dtype) do not hold this request");
}

}  // namespace

FluxModel::FluxModel(ModelInfo info, Placement placement, FluxFolder folder, Prompts prompts,
                     AdapterStore::Limits adapters)
    : info_(std::move(info)),
      placement_(placement),
      folder_(std::move(folder)),
      prompts_(std::move(prompts)),
      adapters_(lora_base(folder_), placement, adapters) {}

void FluxModel::check(const ImageRequest& r) const {
  for (const auto& [field, value] : {std::pair("width", r.width), std::pair("height", r.height)}) {
    check_range(field, value, info_.size_multiple, kMaxSide);
    if (value % info_.size_multiple != 0)
      refuse(field,
             "is " + std::to_string(value) + "; this model takes multiples of " + std::to_string(info_.size_multiple));
  }
  check_range("num_inference_steps", r.num_inference_steps, 1, kMaxSteps);
  check_range("max_sequence_length", r.max_sequence_length, 1, kMaxSequenceLength);
  if (!std::isfinite(r.guidance_scale)) refuse("guidance_scale", "must be a finite number");
  if (!std::isfinite(r.true_cfg_scale)) refuse("true_cfg_scale", "must be a finite number");
  if (!is_valid_utf8(r.prompt)) refuse("prompt", "is not valid UTF-8");
  if (r.negative_prompt && !is_valid_utf8(*r.negative_prompt)) refuse("negative_prompt", "is not valid UTF-8");
  if (r.loras.size() > kMaxLoras)
    refuse("loras",
           "has " + std::to_string(r.loras.size()) + " entries; at most " + std::to_string(kMaxLoras) + " are allowed");
  for (const LoraRequest& lora : r.loras)
    if (!(std::abs(lora.scale) <= kMostLoraScale))
      refuse("loras", "gives " + lora.path + " a scale of " + std::to_string(lora.scale) +
                          "; it must be a finite number from -100 to 100");
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

void FluxModel::condition(FluxPrepared& p) const {
  const auto on_device = [&](const std::vector<float>& values) {
    return at::from_blob(const_cast<float*>(values.data()), {static_cast<std::int64_t>(values.size())})
        .clone()
        .to(placement_.device);
  };
  p.sigmas = on_device(p.schedule.sigmas);
  p.timesteps = on_device(p.schedule.timesteps);
  const FluxTransformer& flux = p.adapted ? p.adapted->transformer : folder_.transformer;
  const auto of = [&](const TextEmbedding& text) {
    return make_conditioning(flux, text.tokens, text.pooled, p.timesteps, p.request.guidance_scale);
  };
  p.conditioning = of(p.prompt);
  if (p.negative) p.negative_conditioning = of(*p.negative);
}

Result<std::unique_ptr<Prepared>> FluxModel::encode(const ImageRequest& request) {
  try {
    const auto start = Clock::now();
    check(request);
    StageScope scope(placement_.device);
    auto p = std::make_unique<FluxPrepared>();
    p->request = request;
    p->rows = request.height / info_.size_multiple;
    p->columns = request.width / info_.size_multiple;
    folder_.transformer.prewarm(1, request.max_sequence_length,
                                p->rows * p->columns);  // made while the prompt is encoded
    p->adapted = adapt(folder_, adapters_, request.loras);
    p->prompt = embed(request.prompt, request.max_sequence_length, p->adapted.get());
    p->warnings_ = p->prompt.warnings;
    if (request.true_cfg_scale > 1 && request.negative_prompt) {
      p->negative = embed(*request.negative_prompt, request.max_sequence_length, p->adapted.get());
      for (const auto& warning : p->negative->warnings) p->warnings_.push_back("negative " + warning);
    } else if (request.true_cfg_scale > 1) {
      p->warnings_.push_back("true_cfg_scale: without a negative_prompt, which may be empty, it changes nothing");
    }
    p->noise = draw_noise(request.seed, folder_.transformer.config().in_channels / 4, 2 * p->rows, 2 * p->columns,
                          placement_.dtype);
    p->schedule = make_schedule(folder_.scheduler, request.num_inference_steps, p->rows * p->columns);
    for (float sigma : p->schedule.sigmas)
      if (!std::isfinite(sigma)) {
        // shift_terminal divides 0 by 0 where there is but one step, a shift that is not above 0 with any number of
        // them.
        if (request.num_inference_steps == 1)
          refuse("num_inference_steps", "is 1, of which this model's scheduler makes no schedule; use 2 or more");
        fail(Code::kDataCorrupt, "[encode] this model's scheduler makes no schedule of " +
                                     std::to_string(request.num_inference_steps) +
                                     " steps; shift (above 0) and shift_terminal (below 1) in " + info_.dir +
                                     "/scheduler/scheduler_config.json decide it");
      }
    condition(*p);
    scope.finish();
    p->add_phase("text", start);
    return std::unique_ptr<Prepared>(std::move(p));
  } catch (...) {
    const Error error = error_in_flight("encode");
    if (error.code == Code::kOutOfMemory) release_cached_memory(placement_.device);
    return error;
  }
}

Result<void> FluxModel::denoise(Prepared& prepared, const StepCallback& on_step) {
  return denoise_batch({&prepared}, {on_step}).front();
}

std::vector<Result<void>> FluxModel::denoise_batch(const std::vector<Prepared*>& batch,
                                                   const std::vector<StepCallback>& on_step) {
  try {
    std::vector<FluxPrepared*> pictures;
    for (Prepared* one : batch) pictures.push_back(&own(*one));
    if (on_step.size() != batch.size()) fail(Code::kInternal, "denoise_batch takes a callback for each picture");
    StageScope scope(placement_.device);
    // What adapters a compiled block reads is one for all of the model's.
    std::unique_lock one_at_a_time(adapted_, std::defer_lock);
    if (std::any_of(pictures.begin(), pictures.end(), [](const FluxPrepared* p) { return p->adapted != nullptr; }))
      one_at_a_time.lock();
    auto results = run_steps(folder_, placement_, pictures, on_step, [&] { scope.finish(); });
    if (one_at_a_time) one_at_a_time.unlock();
    clear_if_asked();
    return results;
  } catch (...) {
    const Error error = error_in_flight("denoise");
    if (error.code == Code::kOutOfMemory) release_cached_memory(placement_.device);
    return std::vector<Result<void>>(batch.size(), error);
  }
}

Result<void> FluxModel::prefetch(const std::vector<LoraRequest>& loras, const AdapterDrops& drops) {
  try {
    const StageScope scope(placement_.device);
    for (const LoraRequest& lora : loras) adapters_.prefetch(lora, drops);
    return {};
  } catch (...) {
    return error_in_flight("prefetch");
  }
}

// Whoever asks while a request with adapters is denoised leaves it to that one's end.
void FluxModel::clear_if_asked() {
  if (!clearing_) return;
  const std::unique_lock nobody_reads(adapted_, std::try_to_lock);
  if (!nobody_reads || !clearing_.exchange(false)) return;
  folder_.transformer.clear_adapters();
  synchronize_current(placement_.device);
}

void FluxModel::forget_adapter(const std::string& id) {
  try {
    StageScope scope(placement_.device);
    adapters_.forget(id);
    clearing_ = true;
    clear_if_asked();
    scope.finish();
  } catch (...) {  // nobody finds it any more, but its slot may still hold it
    spdlog::error("overwriting the slot of adapter {} failed: {}", id, error_in_flight("forget").message);
  }
}
void FluxModel::pin_adapters(const std::set<std::string>& ids) { adapters_.pin(ids); }
AdapterHoldings FluxModel::adapters() const { return adapters_.holdings(); }

Result<Image> FluxModel::decode(Prepared& prepared) {
  try {
    const auto start = Clock::now();
    FluxPrepared& p = own(prepared);
    if (!p.latents.defined()) fail(Code::kInternal, "[decode] denoise() has not been run");
    StageScope scope(placement_.device);
    const at::Tensor decoded = folder_.vae.decode(unpack_latents(p.latents, p.rows, p.columns));
    const auto finite = are_finite({p.latents, decoded});
    if (!finite[0]) no_picture(p.request, "the latents after denoising");
    if (!finite[1]) no_picture(p.request, "the pixels that the VAE decoded");
    p.image = unit_range(decoded);
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
