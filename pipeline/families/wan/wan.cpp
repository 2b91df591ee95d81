#include "pipeline/families/wan/wan.h"

#include <chrono>
#include <utility>

#include "pipeline/engine/family.h"
#include "pipeline/families/wan/model.h"

namespace ditfleet::pipeline {
namespace {

std::unique_ptr<Model> load(const LoadContext& context) {
  const std::string& dir = context.source.dir;
  const auto begun = std::chrono::steady_clock::now();
  auto prompts = WanPrompts::load(dir);
  const auto tokenizers =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun);
  auto folder = load_wan_folder(context.source, context.placement);
  ModelInfo info;
  info.name = context.source.name;
  info.dir = dir;
  info.size_multiple = folder.size_multiple();
  info.weight_bytes = folder.weight_bytes();
  info.load_times = folder.load_times;
  info.load_times.insert(info.load_times.begin(), {"tokenizers", tokenizers});
  return std::make_unique<WanModel>(std::move(info), context.placement, std::move(folder), std::move(prompts),
                                    context.adapters);
}

// Nothing is compiled ahead: the blocks run eagerly.
region::AheadPrograms programs(const ModelSource&, region::ElementType, region::ArchFeatures,
                               const region::CompileOptions&) {
  return {};
}

std::unique_ptr<Tokenizers> load_tokenizers(const std::string& dir) {
  return std::make_unique<WanPrompts>(WanPrompts::load(dir));
}

}  // namespace

const Family& wan_family() {
  static const Family family{{"WanPipeline", "WanImageToVideoPipeline"}, load, programs, load_tokenizers};
  return family;
}

}  // namespace ditfleet::pipeline
