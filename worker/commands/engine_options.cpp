#include "worker/commands/engine_options.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "shared/kernel_cache/open.h"

namespace ditfleet::worker {
namespace {

// Ranks do the same at the same time, so that one is missed sooner than a step is stuck.
constexpr std::chrono::seconds kLongestRankWait{20};

}  // namespace

region::CompileOptions compile_options(const config::Settings& settings) {
  const auto& compile = settings.compile;
  region::CompileOptions options{
      .backend = compile.backend,
      .mode = compile.mode,
      .attention = compile.attention,
      .fullgraph = compile.fullgraph,
      .dynamic = compile.dynamic,
      .error_on_recompile = compile.error_on_recompile,
      .recompile_limit = compile.recompile_limit,
      .transformer = compile.components.transformer,
      .vae = compile.components.vae == "auto" ? std::nullopt : std::optional(compile.components.vae == "true"),
      .rules = {},
      .cxx = compile.cxx,
      .nvrtc = compile.nvrtc};
  for (const auto& rule : compile.rules) {
    auto& made = options.rules.emplace_back();
    for (const auto& [bound, given] : {std::pair(&made.min_frames, rule.min_frames),
                                       {&made.max_frames, rule.max_frames},
                                       {&made.min_tokens, rule.min_tokens},
                                       {&made.max_tokens, rule.max_tokens}})
      if (given) *bound = *given;
    made.mode = rule.mode;
  }
  return options;
}

Result<pipeline::EngineOptions> engine_options(const config::Settings& settings) {
  pipeline::EngineOptions options;
  options.device = settings.worker.device;
  options.dtype = settings.worker.dtype;
  options.threads = settings.worker.threads;
  options.lora_slots = settings.worker.lora.slots;
  options.max_lora_rank = settings.worker.lora.max_rank;
  options.lora_together_rank = settings.worker.lora.together_rank;
  options.lora_host_bytes = settings.worker.lora.host_bytes;
  const auto bytes = [](double gib) { return static_cast<std::int64_t>(gib * (1 << 30)); };
  options.memory = {settings.memory.offload, bytes(settings.memory.limit), bytes(settings.memory.reserve)};
  options.compile = compile_options(settings);
  if (settings.compile.backend != "eager") {
    auto cache = kernel_cache::open_cache(settings);
    if (!cache) return cache.error();
    options.kernel_cache = std::move(*cache);
  }
  return options;
}

Result<pipeline::EngineOptions> engine_options(const config::Settings& settings, const ModelFlags& flags) {
  auto options = engine_options(settings);
  if (options && !flags.device.empty()) options->device = flags.device;
  if (options && !flags.dtype.empty()) options->dtype = flags.dtype;
  return options;
}

Result<std::shared_ptr<RankProcesses>> start_ranks(const config::Settings& settings, const EngineFactory& create) {
  if (settings.worker.gpus == 1) return std::shared_ptr<RankProcesses>();
  const pipeline::RankOptions options{.size = settings.worker.gpus,
                                      .wait = std::min<std::chrono::milliseconds>(
                                          kLongestRankWait, std::chrono::milliseconds(settings.worker.stuck_ms))};
  auto memory = pipeline::Engine::create_rank_memory(options.size, options.wait);
  if (!memory) return memory.error();
  return RankProcesses::start(options, std::move(*memory), create);
}

Result<std::unique_ptr<pipeline::Engine>> create_engine(const std::shared_ptr<RankProcesses>& ranks,
                                                        const EngineFactory& create) {
  return ranks ? ranks->create_engine() : create({});
}

Result<pipeline::ModelSource> source_of(const ModelFlags& flags) {
  auto quantize = config::parse_quantize(flags.weights.quantize);
  if (!quantize) return quantize.error();
  return pipeline::ModelSource{
      "model", flags.dir, flags.weights.files, std::move(*quantize), flags.vae_dtype, flags.weights.attention};
}

}  // namespace ditfleet::worker
