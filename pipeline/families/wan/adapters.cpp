#include "pipeline/families/wan/adapters.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <utility>

#include "pipeline/families/wan/adapter_names.h"
#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

using job::Expert;

std::string shown_name(const LoraRequest& request) {
  return excerpt(request.name.empty() ? std::filesystem::path(request.path).filename().string() : request.name, 128);
}

void warn(const LoraRequest& request, const Adapter& adapter, bool experts, std::vector<std::string>& warnings) {
  const std::string name = shown_name(request);
  if (!adapter.unused.empty()) warnings.push_back("adapter " + name + ": left out, as in diffusers, " + adapter.unused);
  const Expert named = expert_in_name(name);
  if (experts && named != Expert::kBoth && named != request.expert)
    warnings.push_back("adapter " + name + " seems to be for the expert " + std::string(expert_name(named)) +
                       ", but is used for " + std::string(expert_name(request.expert)));
}

}  // namespace

Expert expert_in_name(std::string_view name) {
  bool high = false, low = false;
  std::string word;
  for (std::size_t i = 0; i <= name.size(); ++i) {
    const auto c = static_cast<unsigned char>(i < name.size() ? name[i] : ' ');
    if (std::isalpha(c)) {
      word.push_back(static_cast<char>(std::tolower(c)));
      continue;
    }
    high = high || word == "high" || word == "highnoise";
    low = low || word == "low" || word == "lownoise";
    word.clear();
  }
  return high == low ? Expert::kBoth : high ? Expert::kHigh : Expert::kLow;
}

LoraBase lora_base(const WanFolder& folder) {
  TransformerWeights weights = folder.transformer.weights();
  return wan_lora_base(base_linears(folder.transformer.named_linears(weights)));
}

WanAdapters adapt(const WanFolder& folder, AdapterStore& adapters, const std::vector<LoraRequest>& requests) {
  WanAdapters out;
  std::vector<std::pair<std::shared_ptr<const Adapter>, const LoraRequest*>> used;
  for (const LoraRequest& request : requests) {
    auto adapter = adapters.get(request);
    warn(request, *adapter, folder.transformer_2.has_value(), out.warnings);
    if (request.scale == 0) continue;
    out.held.push_back(adapter);
    used.emplace_back(std::move(adapter), &request);
  }
  for (std::size_t expert = 0; expert < (folder.transformer_2 ? 2 : 1); ++expert) {
    const WanTransformer& transformer = expert ? *folder.transformer_2 : folder.transformer;
    TransformerWeights weights = transformer.weights();
    const std::vector<NamedLinear> linears[] = {transformer.named_linears(weights)};
    bool changed = false;
    for (const auto& [adapter, request] : used) {
      if (request->expert == (expert ? Expert::kHigh : Expert::kLow)) continue;
      add_adapter(*adapter, request->scale, linears);
      changed = true;
    }
    if (changed) out.transformers[expert] = transformer.adapted(std::move(weights));
  }
  return out;
}

}  // namespace ditfleet::pipeline
