#include "pipeline/families/flux/model.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/steps.h"
#include "pipeline/sampling/latents.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kCachedPrompts = 8;

using Clock = std::chrono::steady_clock;

FluxGeneration& own(Generation& generation) {
  auto* mine = dynamic_cast<FluxGeneration*>(&generation);
  if (!mine) fail(Code::kInternal, "this Generation was made by a model of another family");
  return *mine;
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

ModelMemory::Source memory_source(const FluxFolder& folder, const AdapterStore& adapters,
                                  std::shared_ptr<FluxNeeds> needs) {
  const TransformerParts& flux = folder.transformer.parts();
  ModelMemory::Source source{
      .parts = {{&folder.clip.parts(), &folder.t5.parts()}, flux.apart.get(), {flux.blocks.get()}}};
  source.ranks = static_cast<bool>(folder.transformer.team());
  if (!needs) return source;
  source.small = needs->square(512);
  source.large = needs->square(1024);
  source.needs = [needs = std::move(needs)](const RequestSize& size) { return needs->of(size); };
  source.unallocated = [&] { return adapters.unallocated_slot_bytes(); };
  return source;
}

}  // namespace

FluxModel::FluxModel(ModelInfo info, Placement placement, FluxFolder folder, Prompts prompts,
                     AdapterStore::Limits adapters, std::shared_ptr<DeviceMemory> memory,
                     std::shared_ptr<FluxNeeds> needs)
    : ModelBase(std::move(info), placement, lora_base(folder), adapters, folder.transformer.team()),
      folder_(std::move(folder)),
      prompts_(std::move(prompts)),
      embeddings_(kCachedPrompts),
      memory_(std::move(memory), this->info().name, memory_source(folder_, adapter_store(), std::move(needs))) {}

RequestSize FluxModel::size_of(const FluxRequest& request) const {
  return FluxNeeds::size(request, folder_.size_multiple());
}

TextEmbedding FluxModel::embed(const std::string& prompt, int max_sequence_length, const AdaptedModels* adapted) {
  const std::string adapters = adapted ? adapted->text_key : "";
  return embeddings_.get(std::to_string(max_sequence_length) + "/" + adapters + "/" + prompt, [&] {
    PromptIds ids = prompts_.ids(prompt, max_sequence_length);
    TextEmbedding text;
    text.pooled = (adapted ? adapted->clip : folder_.clip).pooled(ids.clip);
    text.tokens = (adapted ? adapted->t5 : folder_.t5).encode(ids.t5);
    text.clip_ids = std::move(ids.clip);
    text.t5_ids = std::move(ids.t5);
    text.warnings = std::move(ids.warnings);
    return text;
  });
}

void FluxModel::condition(FluxGeneration& p) const {
  const auto on_device = [&](const std::vector<float>& values) {
    return at::from_blob(const_cast<float*>(values.data()), {static_cast<std::int64_t>(values.size())})
        .clone()
        .to(placement().device);
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

Schedule FluxModel::schedule_of(const FluxGeneration& p) const {
  const int steps = p.request.num_inference_steps;
  Schedule schedule = make_schedule(folder_.scheduler, steps, p.rows * p.columns);
  if (std::all_of(schedule.sigmas.begin(), schedule.sigmas.end(), [](float sigma) { return std::isfinite(sigma); }))
    return schedule;
  // shift_terminal divides 0 by 0 if there is only one step; a shift that is not above 0 does so with any number.
  if (steps == 1)
    fail(Code::kInvalidArgument, "num_inference_steps is 1, but this model's scheduler needs at least 2",
         "num_inference_steps");
  fail(Code::kDataCorrupt, "[encode] this model's scheduler cannot compute a schedule of " + std::to_string(steps) +
                               " steps; check shift (above 0) and shift_terminal (below 1) in " + info().dir +
                               "/scheduler/scheduler_config.json");
}

std::unique_ptr<Generation> FluxModel::run_encode(const GenerationRequest& asked) {
  const auto start = Clock::now();
  auto p = std::make_unique<FluxGeneration>();
  p->request = read_flux_request(asked, folder_.size_multiple());
  const FluxRequest& request = p->request;
  p->rows = request.height / folder_.size_multiple();
  p->columns = request.width / folder_.size_multiple();
  memory_.check(size_of(request));
  // Runs in the background while the prompt is encoded.
  folder_.transformer.prewarm(request.max_sequence_length, p->rows * p->columns);
  p->noise = draw_noise(request.seed, folder_.transformer.config().in_channels / 4, 2 * p->rows, 2 * p->columns,
                        placement().dtype);
  p->schedule = schedule_of(*p);
  memory_.run_encode(size_of(request), [&] {
    p->adapted = adapt(folder_, adapter_store(), request.loras);
    p->prompt = embed(request.prompt, request.max_sequence_length, p->adapted.get());
    if (request.true_cfg_scale > 1 && request.negative_prompt)
      p->negative = embed(*request.negative_prompt, request.max_sequence_length, p->adapted.get());
    condition(*p);
  });
  for (const auto& warning : p->prompt.warnings) p->add_warning(warning);
  if (p->negative) {
    for (const auto& warning : p->negative->warnings) p->add_warning("negative " + warning);
  } else if (request.true_cfg_scale > 1) {
    p->add_warning("true_cfg_scale has no effect without a negative_prompt (which may be empty)");
  }
  synchronize_current(placement().device);
  memory_.trim();
  p->add_phase("text", start);
  return p;
}

Result<void> FluxModel::run_denoise(Generation& generation, const StepCallback& on_step,
                                    const std::function<void()>& wait) {
  FluxGeneration& p = own(generation);
  return memory_.run_steps(size_of(p.request), on_step, [&](const StepCallback& callback) {
    return run_steps(folder_, placement(), p, callback, wait);
  });
}

bool FluxModel::uses_adapters(const Generation& generation) const {
  const auto* mine = dynamic_cast<const FluxGeneration*>(&generation);
  return mine && mine->adapted;
}

void FluxModel::not_finite(const FluxRequest& request, const std::string& what) {
  const bool adapted =
      std::any_of(request.loras.begin(), request.loras.end(), [](const LoraRequest& lora) { return lora.scale != 0; });
  if (adapted)
    fail(Code::kInvalidArgument,
         "[decode] " + what + " contain NaN or infinity with adapters at the strengths " + strengths(request.loras) +
             " (in the request's order); use smaller strengths or another adapter",
         "loras");
  if (!bad_weight_) bad_weight_ = not_finite_weight(folder_.source);
  fail(Code::kDataCorrupt,
       "[decode] " + what +
           " contain NaN or infinity; check the model's weights, or use another precision (worker.dtype): " +
           *bad_weight_);
}

Media FluxModel::run_decode(Generation& generation, const FrameCallback&) {
  const auto start = Clock::now();
  FluxGeneration& p = own(generation);
  if (!p.latents.defined()) fail(Code::kInternal, "[decode] denoise() has not been run");
  Media image = memory_.run(size_of(p.request), [&] {
    const at::Tensor decoded = folder_.vae.decode(unpack_latents(p.latents, p.rows, p.columns));
    const auto finite = are_finite({p.latents, decoded});
    if (!finite[0]) not_finite(p.request, "the latents after denoising");
    if (!finite[1]) not_finite(p.request, "the pixels that the VAE decoded");
    p.image = unit_range(decoded);
    return to_media(p.image);
  });
  memory_.trim();
  memory_.observe(size_of(p.request));
  p.add_phase("vae", start);
  return image;
}

}  // namespace ditfleet::pipeline
