#include "pipeline/engine/adapt.h"

#include <bit>
#include <cstdint>
#include <filesystem>
#include <regex>
#include <utility>

#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

using job::Expert;

void warn(const LoraRequest& request, const Adapter& adapter, bool experts, std::vector<std::string>& warnings) {
  const std::string name =
      excerpt(request.name.empty() ? std::filesystem::path(request.path).filename().string() : request.name, 128);
  if (!adapter.unused.empty()) warnings.push_back("adapter " + name + ": left out " + adapter.unused);
  const Expert named = expert_in_name(name);
  if (experts && named != Expert::kBoth && named != request.expert)
    warnings.push_back("adapter " + name + " seems to be for the expert " + std::string(expert_name(named)) +
                       ", but is used for " + std::string(expert_name(request.expert)));
}

}  // namespace

Expert expert_in_name(std::string_view name) {
  const auto has_word = [&](const std::string& word) {
    const std::regex whole("(^|[^a-z])" + word + "(noise)?([^a-z]|$)", std::regex::icase);
    return std::regex_search(name.begin(), name.end(), whole);
  };
  const bool high = has_word("high"), low = has_word("low");
  return high == low ? Expert::kBoth : high ? Expert::kHigh : Expert::kLow;
}

LoraBase lora_base(const Network& network) {
  const auto copy = network.clone();
  std::vector<std::vector<BaseLinear>> linears;
  if (const auto transformers = copy->transformers(); !transformers.empty()) {
    TransformerWeights weights = transformers[0]->weights();
    linears.push_back(base_linears(transformers[0]->named_linears(weights)));
  }
  for (TextEncoder* text : copy->text_encoders()) linears.push_back(base_linears(text->named_linears()));
  return network.lora_base(std::move(linears));
}

Adapted adapt(const Network& network, AdapterStore& adapters, const std::vector<LoraRequest>& requests) {
  Adapted out;
  std::vector<std::pair<std::shared_ptr<const Adapter>, const LoraRequest*>> used;
  for (const LoraRequest& request : requests) {
    auto adapter = adapters.get(request);
    warn(request, *adapter, network.entry.experts, out.warnings);
    if (request.scale == 0) continue;
    // Exactly this strength.
    if (adapter->changes_text)
      out.text_key +=
          std::to_string(adapter->id) + ":" + std::to_string(std::bit_cast<std::uint64_t>(request.scale)) + ";";
    out.held.push_back(adapter);
    used.emplace_back(std::move(adapter), &request);
  }
  if (used.empty()) return out;
  auto copy = network.clone();
  const auto transformers = copy->transformers();
  for (std::size_t expert = 0; expert < transformers.size(); ++expert) {
    TransformerWeights weights = transformers[expert]->weights();
    std::vector<std::vector<NamedLinear>> linears{transformers[expert]->named_linears(weights)};
    for (TextEncoder* text : copy->text_encoders()) linears.push_back(text->named_linears());
    bool changed = false;
    for (const auto& [adapter, request] : used) {
      if (request->expert == (expert ? Expert::kHigh : Expert::kLow)) continue;
      add_adapter(*adapter, request->scale, linears);
      changed = true;
    }
    if (changed) transformers[expert]->adapt(std::move(weights));
  }
  out.network = std::move(copy);
  return out;
}

}  // namespace ditfleet::pipeline
