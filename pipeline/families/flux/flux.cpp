#include "pipeline/families/flux/flux.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/engine/family.h"
#include "pipeline/engine/fit.h"
#include "pipeline/families/flux/model.h"
#include "pipeline/region/programs/channels_last_source.h"
#include "pipeline/region/programs/dequantize_source.h"
#include "pipeline/region/programs/matrix_copies_source.h"

namespace ditfleet::pipeline {
namespace {

std::unique_ptr<Model> load(const LoadContext& context) {
  const std::string& dir = context.source.dir;
  const auto begun = std::chrono::steady_clock::now();
  auto prompts = Prompts::load(dir);
  const auto tokenizers =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun);
  const Fit<FluxNeeds> fit = fit_flux(context, false);
  Placement placement = context.placement;
  if (fit.needs)
    placement = fitted_placement(context, fit.source, "flux", fit.needs->of(fit.needs->square(0).first),
                                 fit.needs->of(fit.needs->square(1024).first));
  if (context.source.quantize.contains("*"))
    spdlog::info("{}: quantize auto: {}", dir, formats_text(fit.source.quantize));
  auto folder = load_flux_folder(fit.source, placement, context.regions, context.adapter_columns);
  if (prompts.clip_length() > folder.clip.config().max_position_embeddings)
    fail(Code::kDataCorrupt, dir + "/tokenizer/tokenizer_config.json: model_max_length is " +
                                 std::to_string(prompts.clip_length()) + "; text_encoder has positions for " +
                                 std::to_string(folder.clip.config().max_position_embeddings));
  ModelInfo info;
  info.name = context.source.name;
  info.dir = dir;
  info.size_multiple = folder.size_multiple();
  info.weight_bytes = folder.weight_bytes();
  info.linears = folder.linears();
  info.load_times = folder.load_times;
  info.load_times.insert(info.load_times.begin(), {"tokenizers", tokenizers});
  return std::make_unique<FluxModel>(std::move(info), placement, std::move(folder), std::move(prompts),
                                     context.adapters, context.memory, fit.needs);
}

PlanReport plan(const LoadContext& context, const GenerationRequest& request) {
  const int multiple =
      static_cast<int>(2 * read_vae_config(ConfigFile(context.source.dir + "/vae/config.json")).factor());
  const RequestSize size = FluxNeeds::size(read_flux_request(request, multiple), multiple);
  const Fit<FluxNeeds> fit = fit_flux(context, true);
  PlanReport report = context.memory->plan(fit.needs->of(size));
  report.quantize = fit.source.quantize;
  report.mode = region::mode_name(region::mode_for(context.regions->options, size[0] * size[1], /*frames=*/1));
  return report;
}

// The blocks that the folder's transformer has, without and with adapters.
region::AheadPrograms programs(const ModelSource& source, region::ElementType type, region::ArchFeatures arch,
                               const region::CompileOptions& options) {
  region::AheadPrograms made;
  const bool quantized = has_quantized_linears(source);
  if (options.transformer) {
    const bool wide = type == region::ElementType::kF32;
    made.blocks = FluxTransformer::programs({.dir = source.dir + "/transformer",
                                             .file = source.transformer,
                                             .quantize = quantize_of(source, "transformer")},
                                            {c10::kCPU, wide ? c10::ScalarType::Float : c10::ScalarType::BFloat16},
                                            arch.fp8_products);
  }
  if (!arch.gpu) return made;
  if (!made.blocks.empty()) made.fixed.push_back(region::matrix_copies_program());  // brings adapters to the blocks
  if (options.vae.value_or(true)) made.fixed.push_back(region::channels_last_program());
  if (quantized) made.fixed.push_back(region::dequantize_program());
  return made;
}

std::unique_ptr<Tokenizers> load_tokenizers(const std::string& dir) {
  return std::make_unique<Prompts>(Prompts::load(dir));
}

}  // namespace

const Family& flux_family() {
  static const Family family{{"FluxPipeline"}, load, programs, load_tokenizers, plan};
  return family;
}

}  // namespace ditfleet::pipeline
