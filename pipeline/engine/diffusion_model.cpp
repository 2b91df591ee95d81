#include "pipeline/engine/diffusion_model.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/engine/generation.h"
#include "pipeline/region/run/region_host.h"
#include "pipeline/sampling/latents.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kCachedPrompts = 8;

using std::chrono::duration_cast, std::chrono::microseconds;
using Clock = std::chrono::steady_clock;

DiffusionGeneration& own(Generation& generation) {
  auto* mine = dynamic_cast<DiffusionGeneration*>(&generation);
  if (!mine) fail(Code::kInternal, "this Generation was made by another kind of model");
  return *mine;
}

// "100 and 0.5"
std::string strengths(const std::vector<LoraRequest>& loras) {
  std::string text;
  for (std::size_t i = 0; i < loras.size(); ++i)
    text += fmt::format("{}{:g}", i == 0 ? "" : i + 1 == loras.size() ? " and " : ", ", loras[i].scale);
  return text;
}

std::string formats_text(const ModelSource& source) {
  std::string text;
  for (const auto& [component, format] : source.quantize)
    text += (text.empty() ? "" : ", ") + component + " in " + format;
  return text.empty() ? "nothing is quantized" : text;
}

// "transformer", "transformer_2": diffusers' names of equal components.
std::string numbered(const char* name, std::size_t i) { return i == 0 ? name : name + ("_" + std::to_string(i + 1)); }

ModelInfo info_of(const LoadContext& context, Network& network, const Folder& folder) {
  ModelInfo info;
  info.name = context.source.name;
  info.dir = context.source.dir;
  if (const auto width = network.entry.fields.find("width"); width != network.entry.fields.end())
    info.size_multiple = static_cast<int>(width->second.multiple_of);
  info.experts = network.entry.experts;
  info.load_times = folder.times;
  info.weight_bytes = network.vae_bytes();
  const auto add = [&](const std::string& name, const auto& part) {
    info.weight_bytes += part.bytes();
    info.linears[name] = part.linears();
  };
  std::size_t i = 0;
  for (const Transformer* one : network.transformers()) add(numbered("transformer", i++), *one);
  i = 0;
  for (const TextEncoder* one : network.text_encoders())
    add(one->component().empty() ? numbered("text_encoder", i++) : one->component(), *one);
  return info;
}

// Runs steps in all ranks of a team. Rank 0 decides after each step whether to go on. The others cannot go on without a
// rank that fails.
template <class Denoise>
auto in_all_ranks(const parallel::Team& team, const StepCallback& on_step, const Denoise& denoise) {
  auto done = denoise([&](const StepProgress& progress) {
    const bool go_on = team.group->rank() > 0 || !on_step || on_step(progress);
    return unwrap(team.group->agree(go_on));
  });
  if (!done && done.error().code != Code::kCanceled) {  // all have agreed to cancel
    team.group->abort();
    done = Error{.code = Code::kDeviceFault, .message = done.error().message, .kind = done.error().kind};
  }
  return done;
}

}  // namespace

std::unique_ptr<Model> DiffusionModel::load(const Family& family, const LoadContext& asked) {
  LoadContext context = asked;
  check_components(family, context.source.dir);
  auto begun = Clock::now();
  auto tokenizers = family.load_tokenizers(context.source);
  const auto tokenizers_took = duration_cast<microseconds>(Clock::now() - begun);
  const Fit fitted = fit(family, context, /*always=*/false);
  if (context.source.quantize.contains("*"))
    spdlog::info("{}: quantize auto: {}", context.source.dir, formats_text(fitted.source));
  context.source = fitted.source;
  context.placement = fitted_placement(family, asked, fitted);
  Folder folder(family, context, tokenizers.get());
  folder.times.emplace_back("tokenizers", tokenizers_took);
  auto network = load_network(folder);
  begun = Clock::now();
  Transformer::compile(network->transformers(), context.regions);
  const bool compiled = context.regions->compiles_blocks();
  folder.times.emplace_back("compile",
                            duration_cast<microseconds>(compiled ? Clock::now() - begun : Clock::duration()));
  ModelInfo info = info_of(context, *network, folder);
  return std::unique_ptr<Model>(
      new DiffusionModel(family, context, fitted, std::move(info), std::move(network), std::move(tokenizers)));
}

PlanReport DiffusionModel::plan(const Family& family, const LoadContext& context, const GenerationRequest& request) {
  const Fit fitted = fit(family, context, /*always=*/true);
  const RequestSize size = fitted.needs->size_of(request);
  PlanReport report = context.memory->plan(fitted.needs->of(size));
  report.quantize = fitted.source.quantize;
  const job::ModelEntry& entry = fitted.needs->entry();
  const std::int64_t tokens =
      std::int64_t{size.width} * size.height / entry.pixels_per_token * entry.latent_frames(size.frames);
  report.mode = region::mode_name(region::mode_for(context.regions->options, tokens, size.frames));
  return report;
}

DiffusionModel::DiffusionModel(const Family& family, const LoadContext& context, const Fit& fit, ModelInfo info,
                               std::unique_ptr<Network> network, std::unique_ptr<Tokenizers> tokenizers)
    : family_(family),
      source_(context.source),
      info_(std::move(info)),
      network_(std::move(network)),
      tokenizers_(std::move(tokenizers)),
      team_(parallel::Team::all(context.regions->ranks)),
      prompts_(kCachedPrompts),
      adapters_(lora_base(*network_), context.placement, context.adapters),
      none_(context.placement, "none", /*repeats=*/false),
      memory_(context.memory, info_.name, memory_source(fit.needs)) {}

ModelMemory::Source DiffusionModel::memory_source(std::shared_ptr<Needs> needs) {
  ModelMemory::Source source;
  for (const TextEncoder* text : network_->text_encoders()) source.parts.encoders.push_back(&text->parts());
  for (const Transformer* transformer : network_->transformers()) {
    source.parts.blocks.push_back(transformer->parts().blocks.get());
    if (const auto& apart = transformer->parts().apart) source.parts.encoders.push_back(apart.get());
  }
  if (source.parts.blocks.empty()) source.parts.blocks.push_back(&none_);
  source.ranks = static_cast<bool>(team_);
  if (!needs) return source;
  source.small = needs->size_of(family_.small);
  source.large = needs->size_of(family_.typical);
  source.needs = [needs = std::move(needs)](const RequestSize& size) { return needs->of(size); };
  source.unallocated = [this] { return adapters_.unallocated_slot_bytes(); };
  return source;
}

template <class Run>
auto DiffusionModel::stage(const char* name, Run run) -> Result<decltype(run(std::declval<StageScope&>()))> {
  auto made = result_of(name, [&] {
    StageScope scope(network_->placement.device);
    auto out = run(scope);
    scope.finish();
    return out;
  });
  if (!made && made.error().code == Code::kOutOfMemory) release_cached_memory(network_->placement.device);
  return made;
}

Result<RequestSize> DiffusionModel::size_of(const GenerationRequest& request) const {
  return result_of("size", [&] { return pipeline::size_of(*network_, request, team_); });
}

EncodedPrompt DiffusionModel::embed(const Network& network, const std::string& prompt, const Settings& settings,
                                    const std::string& text_key) {
  const auto encode = [&] { return network.encode(tokenizers_->ids(prompt, settings.text_tokens()), settings); };
  if (network.encodes_images_with_text()) return encode();
  return prompts_.get(std::to_string(settings.text_tokens()) + "/" + text_key + "/" + prompt, encode);
}

Result<std::unique_ptr<Generation>> DiffusionModel::encode(const GenerationRequest& request) {
  return stage("encode", [&](StageScope& scope) { return run_encode(scope, request); });
}

std::unique_ptr<Generation> DiffusionModel::run_encode(StageScope& scope, const GenerationRequest& request) {
  const auto start = Clock::now();
  auto made = std::make_unique<DiffusionGeneration>();
  DiffusionGeneration& g = *made;
  g.settings = settings_of(*network_, request);
  g.team = request.alone.value_or(false) ? parallel::Team() : team_;
  g.size = pipeline::size_of(*network_, g.settings, g.team.count);
  memory_.check(g.size);
  network_->prewarm(g.settings);  // in the background while the prompt is encoded
  g.schedule = network_->schedule(g.settings);
  memory_.run_encode(g.size, [&] {
    g.adapted = adapt(*network_, adapters_, g.settings.loras);
    const Network& network = g.adapted.network ? *g.adapted.network : *network_;
    g.conditions = encode_conditions(network, g.settings, [&](const std::string& prompt) {
      return embed(network, prompt, g.settings, g.adapted.text_key);
    });
    g.denoiser = network.denoiser(g.settings, g.schedule, g.conditions);
  });
  g.warn(g.settings.warnings);
  g.warn(g.adapted.warnings);
  g.warn(g.conditions.prompt.ids.warnings);
  if (g.conditions.negative) g.warn(g.conditions.negative->ids.warnings, "negative ");
  scope.finish();
  g.device_phases_us_["text"] = scope.lap_us();
  memory_.trim();
  g.add_phase("text", start);
  return made;
}

namespace {

[[noreturn]] void fail_of_another() { fail(Code::kInvalidArgument, "[state] the state is of another request"); }

// Returns the number of steps that are done.
std::int64_t visit_state(RunState& state, int& skipped, std::int64_t done, std::int64_t steps, at::Tensor& latents,
                         Sampler& sampler, BlockCaches* caches) {
  std::int64_t total = steps, skips = skipped;
  state.number("steps", total);
  state.number("done", done);
  state.number("skipped", skips);
  const auto size = latents.sizes().vec();
  const bool derived = sampler.derives_latents();
  if (!derived) state.tensor("latents", latents);
  if (total != steps || done < 1 || done > steps) fail_of_another();
  sampler.visit(state);
  if (derived && state.loads()) latents = sampler.latents_after(done - 1);
  if (!latents.defined() || latents.sizes().vec() != size) fail_of_another();
  if (caches) caches->visit(state);
  skipped = static_cast<int>(skips);
  return done;
}

}  // namespace

Result<at::Tensor> DiffusionModel::run_steps(DiffusionGeneration& g, const StepCallback& on_step,
                                             const std::function<void()>& wait) {
  Network& network = g.adapted.network ? *g.adapted.network : *network_;
  const auto transformers = network.transformers();
  const std::shared_ptr<void> finish(nullptr, [&](void*) {
    for (const Transformer* transformer : transformers) transformer->parts().blocks->finish();
  });
  for (const Transformer* transformer : transformers) transformer->load_adapters();
  const auto sampler = network.sampler(g.settings, g.schedule);
  at::Tensor latents = network.first_latents(g.conditions, g.schedule).to(network.placement.device);
  const auto steps = static_cast<std::int64_t>(g.schedule.timesteps.size());
  std::optional<BlockCaches> caches;
  if (g.settings.cache_threshold > 0) caches.emplace(g.settings.cache_threshold);
  g.skipped_steps_ = 0;
  std::int64_t first = 0;
  if (!g.from_.empty()) {
    RunState state(g.from_, network.placement.device);
    first = visit_state(state, g.skipped_steps_, 1, steps, latents, *sampler, caches ? &*caches : nullptr);
  }
  const int skipped_before = g.skipped_steps_;
  for (std::int64_t step = first; step < steps; ++step) {
    memory_.use_blocks(g.denoiser->expert(step));
    const at::Tensor velocity = guided_velocity(*g.denoiser, step, latents, g.conditions.negative.has_value(), g.team,
                                                caches ? &*caches : nullptr);
    const bool skipped = caches && caches->skipped();
    g.skipped_steps_ += skipped;
    latents = g.denoiser->stepped(sampler->step(latents, velocity, step), step);
    wait();
    if (!skipped)
      memory_.after_step(g.size,
                         step + 1 - first - (g.skipped_steps_ - skipped_before));  // it times a step with all blocks
    if (!on_step) continue;
    StepProgress progress;
    progress.step = static_cast<int>(step + 1);
    progress.total = static_cast<int>(steps);
    progress.skipped = skipped;
    progress.preview = [&] {
      return result_of("preview", [&] {
        const at::Tensor pixels = network_->preview(sampler->estimate(latents, velocity, step), g.settings);
        if (!are_finite({pixels})[0]) fail(Code::kDataCorrupt, "the current estimate contains NaN or infinity");
        return to_media(unit_range(pixels));
      });
    };
    progress.state = [&](std::int64_t most_bytes) -> Result<std::string> {
      if (caches && g.team.count > 1) return unavailable("several GPUs with a field cache have no common state");
      return result_of("state", [&] {
        RunState state(most_bytes);
        visit_state(state, g.skipped_steps_, step + 1, steps, latents, *sampler, caches ? &*caches : nullptr);
        return state.file();
      });
    };
    if (!on_step(progress))
      return Error{Code::kCanceled, "canceled after step " + std::to_string(step + 1) + " of " + std::to_string(steps)};
  }
  return network.finished(latents, g.settings);
}

Result<void> DiffusionModel::denoise(Generation& generation, const StepCallback& on_step) {
  const auto denoise_here = [&](const StepCallback& callback) -> Result<void> {
    auto latents = stage("denoise", [&](StageScope& scope) {
      const auto begun = Clock::now();
      DiffusionGeneration& g = own(generation);
      std::unique_lock one_at_a_time(adapted_, std::defer_lock);
      if (g.adapted.network) one_at_a_time.lock();
      const auto wait = [&] {
        scope.finish();
        const bool first = g.device_phases_us_.emplace("first_step", 0).second;
        g.device_phases_us_[first ? "first_step" : "steady_steps"] += scope.lap_us();
      };
      auto made = memory_.run_steps(g.size, [&] { return run_steps(g, callback, wait); });
      g.add_phase("denoise", begun);
      if (made) g.latents = *made;
      return made;
    });
    if (!latents) return latents.error();
    return *latents ? Result<void>() : latents->error();
  };
  const auto* mine = dynamic_cast<const DiffusionGeneration*>(&generation);
  const Result<void> done =
      mine && mine->team ? in_all_ranks(mine->team, on_step, denoise_here) : denoise_here(on_step);
  const auto cleared = stage("denoise", [&](StageScope&) {
    clear_if_asked();
    return true;
  });
  return done && !cleared ? cleared.error() : done;
}

void DiffusionModel::not_finite(const DiffusionGeneration& g, const std::string& what) {
  if (g.adapted.network)
    fail(Code::kInvalidArgument,
         "[decode] " + what + " contain NaN or infinity with adapters at the strengths " + strengths(g.settings.loras) +
             " (in the request's order); use smaller strengths or another adapter",
         "loras");
  if (!bad_weight_) bad_weight_ = not_finite_weight(family_, source_);
  fail(Code::kDataCorrupt,
       "[decode] " + what +
           " contain NaN or infinity; check the model's weights, or use another precision (worker.dtype): " +
           *bad_weight_);
}

Result<Media> DiffusionModel::decode(Generation& generation, const FrameCallback& on_frames) {
  return stage("decode", [&](StageScope& scope) { return run_decode(scope, own(generation), on_frames); });
}

Media DiffusionModel::run_decode(StageScope& scope, DiffusionGeneration& g, const FrameCallback& on_frames) {
  const auto start = Clock::now();
  if (!g.latents.defined()) fail(Code::kInternal, "[decode] denoise() has not been run");
  if (!are_finite({g.latents})[0]) not_finite(g, "the latents after denoising");
  memory_.make_room_to_decode(g.size);
  const bool video = network_->entry.media == job::MediaKind::kVideo;
  Media media = memory_.run(g.size, [&] {
    Media made;
    made.frames = 0;
    if (video) made.frame_rate = g.settings.real("fps");
    made.rgb.reserve(static_cast<std::size_t>(g.size.pixels()) * 3);
    network_->decode(g.latents, g.settings, [&](const at::Tensor& decoded) {
      if (!are_finite({decoded})[0]) not_finite(g, "the pixels that the VAE decoded");
      const at::Tensor unit = unit_range(decoded);
      const Media part = to_media(unit);
      made.width = part.width;
      made.height = part.height;
      made.frames += part.frames;
      made.rgb.insert(made.rgb.end(), part.rgb.begin(), part.rgb.end());
      if (!video) g.image = unit;
      if (video && on_frames) on_frames(made);
    });
    return made;
  });
  scope.finish();
  g.device_phases_us_["vae"] = scope.lap_us();
  memory_.trim();
  memory_.observe(g.size);
  g.add_phase("vae", start);
  return media;
}

Result<void> DiffusionModel::prefetch(const std::vector<LoraRequest>& loras, const AdapterDrops& drops) {
  return result_of("prefetch", [&] {
    const StageScope scope(network_->placement.device);
    for (const LoraRequest& lora : loras) adapters_.prefetch(lora, drops);
  });
}

// If a request with adapters is being denoised, its end clears the columns.
void DiffusionModel::clear_if_asked() {
  if (!clearing_) return;
  const std::unique_lock nobody_reads(adapted_, std::try_to_lock);
  if (!nobody_reads || !clearing_.exchange(false)) return;
  for (const Transformer* transformer : network_->transformers()) transformer->clear_adapters();
  synchronize_current(network_->placement.device);
}

void DiffusionModel::forget_adapter(const std::string& id) {
  try {
    StageScope scope(network_->placement.device);
    adapters_.forget(id);
    clearing_ = true;
    clear_if_asked();
    scope.finish();
  } catch (...) {  // no request finds it any more, but its slot may still hold it
    spdlog::error("cannot overwrite the slot of adapter {}: {}", id, error_in_flight("forget").message);
  }
}

}  // namespace ditfleet::pipeline
