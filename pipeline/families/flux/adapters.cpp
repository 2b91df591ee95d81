#include "pipeline/families/flux/adapters.h"

#include <cstring>
#include <utility>

#include "pipeline/families/flux/adapter_names.h"

namespace ditfleet::pipeline {
namespace {

// Exactly this number.
std::string bits_of(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return std::to_string(bits);
}

}  // namespace

LoraBase lora_base(const FluxFolder& folder) {
  TransformerWeights weights = folder.transformer.weights();
  ClipEncoder clip = folder.clip;
  T5Encoder t5 = folder.t5;
  return flux_lora_base(base_linears(folder.transformer.named_linears(weights)), base_linears(clip.named_linears()),
                        base_linears(t5.named_linears()));
}

std::shared_ptr<const AdaptedModels> adapt(const FluxFolder& folder, AdapterStore& adapters,
                                           const std::vector<LoraRequest>& requests) {
  std::vector<std::shared_ptr<const Adapter>> held;
  // At strength 0 an adapter must be usable, but adds nothing.
  std::vector<std::pair<std::shared_ptr<const Adapter>, double>> used;
  for (const LoraRequest& request : requests)
    if (auto adapter = adapters.get(request); request.scale != 0) used.emplace_back(std::move(adapter), request.scale);
  if (used.empty()) return nullptr;
  TransformerWeights weights = folder.transformer.weights();
  ClipEncoder clip = folder.clip;
  T5Encoder t5 = folder.t5;
  std::string text_key;
  {
    // In the order of flux_lora_base().
    const std::vector<NamedLinear> linears[] = {folder.transformer.named_linears(weights), clip.named_linears(),
                                                t5.named_linears()};
    for (const auto& [adapter, strength] : used) {
      add_adapter(*adapter, strength, linears);
      if (adapter->changes_text) text_key += std::to_string(adapter->id) + ":" + bits_of(strength) + ";";
      held.push_back(adapter);
    }
  }
  return std::make_shared<const AdaptedModels>(AdaptedModels{folder.transformer.adapted(std::move(weights)),
                                                             std::move(clip), std::move(t5), std::move(text_key),
                                                             std::move(held)});
}

}  // namespace ditfleet::pipeline
