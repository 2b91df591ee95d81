#include "pipeline/families/wan/wan.h"

#include <chrono>
#include <filesystem>
#include <utility>

#include "pipeline/engine/family.h"
#include "pipeline/families/wan/model.h"
#include "pipeline/region/programs/dequantize_source.h"

namespace ditfleet::pipeline {
namespace {

std::unique_ptr<Model> load(const LoadContext& context) {
  const std::string& dir = context.source.dir;
  const auto begun = std::chrono::steady_clock::now();
  auto prompts = WanPrompts::load(dir);
  const auto tokenizers =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun);
  auto folder = load_wan_folder(context.source, context.placement, context.regions);
  ModelInfo info;
  info.name = context.source.name;
  info.dir = dir;
  info.size_multiple = folder.size_multiple();
  info.weight_bytes = folder.weight_bytes();
  info.linears = folder.linears();
  info.load_times = folder.load_times;
  info.load_times.insert(info.load_times.begin(), {"tokenizers", tokenizers});
  return std::make_unique<WanModel>(std::move(info), context.placement, std::move(folder), std::move(prompts),
                                    context.adapters);
}

// The blocks of both experts, and what computes the values of quantized weights.
region::AheadPrograms programs(const ModelSource& source, region::ElementType type, region::ArchFeatures arch,
                               const region::CompileOptions& options) {
  check_wan_quantize(source);
  region::AheadPrograms made;
  const Placement host{c10::kCPU,
                       type == region::ElementType::kF32 ? c10::ScalarType::Float : c10::ScalarType::BFloat16};
  for (const char* name : {"/transformer", "/transformer_2"}) {
    const std::string dir = source.dir + name;
    if (!options.transformer || !std::filesystem::exists(dir + "/config.json")) continue;
    for (auto& one : WanTransformer::programs(dir, host, quantize_of(source, "transformer"), arch.fp8_products))
      made.blocks.push_back(std::move(one));
  }
  if (arch.gpu && !source.quantize.empty()) made.fixed.push_back(region::dequantize_program());
  return made;
}

std::unique_ptr<Tokenizers> load_tokenizers(const std::string& dir) {
  return std::make_unique<WanPrompts>(WanPrompts::load(dir));
}

}  // namespace

const Family& wan_family() {
  static const Family family{{"WanPipeline"}, load, programs, load_tokenizers};
  return family;
}

}  // namespace ditfleet::pipeline
