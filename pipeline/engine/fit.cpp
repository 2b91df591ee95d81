#include "pipeline/engine/fit.h"

#include <filesystem>

#include "pipeline/device/failure.h"
#include "pipeline/region/libraries/fp8.h"
#include "pipeline/weights/safetensors.h"
#include "shared/core/sha256.h"

namespace ditfleet::pipeline {
namespace {

// A hash of all that the bytes and the layout of the weights depend on.
std::string host_key(const LoadContext& context, const ModelSource& source, std::string_view family) {
  std::string key = std::string(family) + '/' + std::to_string(static_cast<int>(context.placement.dtype)) + '/' +
                    std::to_string(context.adapter_columns) + '/' + context.regions->options.backend;
  for (const auto& [component, format] : source.quantize) key += '/' + component + '=' + format;
  std::vector<std::string> files;
  if (!source.transformer.empty()) files.push_back(source.transformer);
  for (const auto& file : std::filesystem::recursive_directory_iterator(source.dir))
    if (file.is_regular_file()) files.push_back(file.path().string());
  std::sort(files.begin(), files.end());
  for (const auto& file : files) key += '/' + file_identity(file);
  Sha256 hash;
  hash.update(key);
  return hash.hex();
}

}  // namespace

std::vector<Formats> formats_to_try(ModelSource& source, const std::string& text_encoder, c10::Device device,
                                    bool (*stored_quantized)(const ModelSource&)) {
  if (!source.quantize.contains("*")) return {source.quantize};
  source.quantize.clear();
  std::vector<Formats> formats{{}};
  if (stored_quantized(source)) return formats;
  if (device.is_cpu() || region::has_fp8_products(device))
    formats.push_back({{"transformer", "fp8"}, {text_encoder, "nf4"}});
  formats.push_back({{"transformer", "nf4"}, {text_encoder, "nf4"}});
  return formats;
}

Placement fitted_placement(const LoadContext& context, const ModelSource& source, std::string_view family,
                           const MemoryNeeds& smallest, const MemoryNeeds& typical) {
  if (const PlanReport plan = context.memory->plan(smallest); !plan.choice.plan)
    fail(Code::kOutOfMemory, budget_text(plan.needs, plan.choice, plan.available));
  Placement placement = context.placement;
  placement.host_key = host_key(context, source, family);
  placement.on_host = !context.memory->fits_beside(typical);
  return placement;
}

std::string formats_text(const Formats& quantize) {
  std::string text;
  for (const auto& [component, format] : quantize) text += (text.empty() ? "" : ", ") + component + " in " + format;
  return text.empty() ? "nothing is quantized" : text;
}

}  // namespace ditfleet::pipeline
