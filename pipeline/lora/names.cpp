#include "pipeline/lora/names.h"

#include <algorithm>
#include <cctype>
#include <utility>

namespace ditfleet::pipeline {
namespace {

constexpr std::string_view kPeftPrefix = "base_model.model.";

std::string flat(std::size_t component, std::string_view name) {
  std::string text = std::to_string(component) + ":";
  for (char c : name) text.push_back(c == '.' ? '_' : c);
  return text;
}

// Removes the block number: the first number between underscores or dots.
std::string without_block(const std::string& flattened) {
  for (std::size_t at = flattened.find('_'); at != std::string::npos; at = flattened.find('_', at + 1)) {
    std::size_t end = at + 1;
    while (end < flattened.size() && std::isdigit(static_cast<unsigned char>(flattened[end]))) ++end;
    if (end > at + 1 && (end == flattened.size() || flattened[end] == '_'))
      return flattened.substr(0, at + 1) + flattened.substr(end);
  }
  return flattened;
}

}  // namespace

LoraNames::LoraNames(LoraBase base) : base_(std::move(base)) {
  for (std::size_t i = 0; i < base_.components.size(); ++i) {
    const LoraComponent& component = base_.components[i];
    for (const std::string& prefix : component.prefixes) prefixes_.emplace_back(prefix, i);
    for (const BaseLinear& linear : component.linears)
      add(linear.name, {linear.name, linear.in, linear.out, {{linear.slot, linear.first_row, linear.out}}, {}, i});
    for (LoraTarget target : component.aliases) {
      target.component = i;
      add(target.name, target);
    }
    for (const std::string& name : component.elsewhere) note_shape(i, name);
  }
  std::stable_sort(prefixes_.begin(), prefixes_.end(),
                   [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
}

void LoraNames::note_shape(std::size_t component, const std::string& name) {
  shapes_of_names_.insert(without_block(flat(component, name)));
}

void LoraNames::add(const std::string& name, LoraTarget target) {
  note_shape(target.component, name);
  targets_.emplace(flat(target.component, name), std::move(target));
}

LoraNames::Split LoraNames::split(std::string_view module) const {
  if (module.starts_with(kPeftPrefix)) module.remove_prefix(kPeftPrefix.size());
  for (const auto& [prefix, component] : prefixes_)
    if (module.starts_with(prefix)) return {component, module.substr(prefix.size())};
  return {0, module};
}

const LoraTarget* LoraNames::find(std::string_view module) const {
  const Split s = split(module);
  const auto at = targets_.find(flat(s.component, s.rest));
  return at == targets_.end() ? nullptr : &at->second;
}

bool LoraNames::knows_elsewhere(std::string_view module) const {
  const Split s = split(module);
  return shapes_of_names_.contains(without_block(flat(s.component, s.rest)));
}

}  // namespace ditfleet::pipeline
