#include "pipeline/families/wan/wan.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <filesystem>
#include <utility>

#include "pipeline/engine/fit.h"
#include "pipeline/families/wan/model.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/region/programs/channels_last_source.h"
#include "pipeline/region/programs/dequantize_source.h"
#include "pipeline/region/programs/matrix_copies_source.h"

namespace ditfleet::pipeline {
namespace {

constexpr int kTypicalFrames = 81;

bool stored_quantized(const ModelSource& source) {
  const auto stored = [&](const char* name, Library library) {
    return Parameters::open(source.dir + name, library, {c10::kCPU, c10::ScalarType::Float}).has_quantized();
  };
  return stored("/transformer", Library::kDiffusers) || stored("/text_encoder", Library::kTransformers);
}

Fit<WanNeeds> fit_wan(LoadContext context, bool always) {
  const auto formats = formats_to_try(context.source, "text_encoder", context.placement.device, stored_quantized);
  const auto video = [](int frames) { return [frames](const WanNeeds& needs) { return needs.video(frames).first; }; };
  return fit<WanNeeds>(std::move(context), always, formats, {video(kTypicalFrames), video(25), video(0)});
}

std::unique_ptr<Model> load(const LoadContext& context) {
  const std::string& dir = context.source.dir;
  const auto begun = std::chrono::steady_clock::now();
  auto prompts = WanPrompts::load(dir);
  const auto tokenizers =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun);
  const Fit<WanNeeds> fit = fit_wan(context, false);
  Placement placement = context.placement;
  if (fit.needs)
    placement = fitted_placement(context, fit.source, "wan", fit.needs->of(fit.needs->video(0).first),
                                 fit.needs->of(fit.needs->video(kTypicalFrames).first));
  if (context.source.quantize.contains("*"))
    spdlog::info("{}: quantize auto: {}", dir, formats_text(fit.source.quantize));
  auto folder = load_wan_folder(fit.source, placement, context.regions, context.adapter_columns);
  ModelInfo info;
  info.name = context.source.name;
  info.dir = dir;
  info.size_multiple = folder.size_multiple();
  info.experts = folder.transformer_2.has_value();
  info.weight_bytes = folder.weight_bytes();
  info.linears = folder.linears();
  info.load_times = folder.load_times;
  info.load_times.insert(info.load_times.begin(), {"tokenizers", tokenizers});
  return std::make_unique<WanModel>(std::move(info), placement, std::move(folder), std::move(prompts), context.adapters,
                                    context.memory, fit.needs);
}

PlanReport plan(const LoadContext& context, const GenerationRequest& request) {
  const Fit<WanNeeds> fit = fit_wan(context, true);
  const RequestSize size = fit.needs->size(request);
  PlanReport report = context.memory->plan(fit.needs->of(size));
  report.mode = region::mode_name(
      region::mode_for(context.regions->options, size[0] * size[1] * size[2], fit.needs->frames(size)));
  report.quantize = fit.source.quantize;
  return report;
}

// The blocks of both experts, what brings adapters to them, what lies between the VAE's convolutions, and what computes
// the values of quantized weights.
region::AheadPrograms programs(const ModelSource& source, region::ElementType type, region::ArchFeatures arch,
                               const region::CompileOptions& options) {
  check_wan_quantize(source);
  region::AheadPrograms made;
  const Placement host{c10::kCPU,
                       type == region::ElementType::kF32 ? c10::ScalarType::Float : c10::ScalarType::BFloat16};
  for (const char* name : {"/transformer", "/transformer_2"}) {
    const std::string dir = source.dir + name;
    if (!options.transformer || !std::filesystem::exists(dir + "/config.json")) continue;
    for (auto& one : WanTransformer::programs({.dir = dir, .quantize = quantize_of(source, "transformer")}, host,
                                              arch.fp8_products))
      made.blocks.push_back(std::move(one));
  }
  if (arch.gpu && !made.blocks.empty()) made.fixed.push_back(region::matrix_copies_program());
  if (arch.gpu && options.vae.value_or(true)) made.fixed.push_back(region::channels_last_program());
  if (arch.gpu && !source.quantize.empty()) made.fixed.push_back(region::dequantize_program());
  return made;
}

std::unique_ptr<Tokenizers> load_tokenizers(const std::string& dir) {
  return std::make_unique<WanPrompts>(WanPrompts::load(dir));
}

}  // namespace

const Family& wan_family() {
  static const Family family{{"WanPipeline", "WanImageToVideoPipeline"}, load, programs, load_tokenizers, plan};
  return family;
}

}  // namespace ditfleet::pipeline
