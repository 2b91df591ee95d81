#include "pipeline/lora/keys.h"

#include <array>
#include <utility>

namespace ditfleet::pipeline {
namespace {

bool cut_end(std::string_view& text, std::string_view end) {
  if (text.size() <= end.size() || text.substr(text.size() - end.size()) != end) return false;
  text.remove_suffix(end.size());
  return true;
}

// Longer suffixes before their own suffixes.
constexpr std::array<std::pair<std::string_view, LoraKeyKind>, 17> kEndings{{
    {".lora_A.weight", LoraKeyKind::kDown},
    {".lora_B.weight", LoraKeyKind::kUp},
    {".lora_linear_layer.down.weight", LoraKeyKind::kDown},
    {".lora_linear_layer.up.weight", LoraKeyKind::kUp},
    {".lora_down.weight", LoraKeyKind::kDown},
    {".lora_up.weight", LoraKeyKind::kUp},
    {".lora.down.weight", LoraKeyKind::kDown},
    {".lora.up.weight", LoraKeyKind::kUp},
    {".down.weight", LoraKeyKind::kDown},
    {".up.weight", LoraKeyKind::kUp},
    {".alpha", LoraKeyKind::kAlpha},
    {".dora_scale", LoraKeyKind::kDora},
    {".lora_magnitude_vector.weight", LoraKeyKind::kDora},
    {".lora_magnitude_vector", LoraKeyKind::kDora},
    {".diff", LoraKeyKind::kDiff},
    {".diff_b", LoraKeyKind::kBias},
    {".lora_B.bias", LoraKeyKind::kBias},
}};

// ".lora_A.NAME.weight": PEFT's format for named adapters.
constexpr std::array<std::pair<std::string_view, LoraKeyKind>, 3> kNamed{
    {{".lora_A.", LoraKeyKind::kDown},
     {".lora_B.", LoraKeyKind::kUp},
     {".lora_magnitude_vector.", LoraKeyKind::kDora}}};

}  // namespace

LoraKey parse_lora_key(std::string_view name) {
  for (const auto& [ending, kind] : kEndings)
    if (std::string_view module = name; cut_end(module, ending)) return {kind, module};
  if (std::string_view rest = name; cut_end(rest, ".weight"))
    for (const auto& [middle, kind] : kNamed) {
      const auto at = rest.rfind(middle);
      if (at != rest.npos && at > 0 && rest.size() > at + middle.size() &&
          rest.find('.', at + middle.size()) == rest.npos)
        return {kind, rest.substr(0, at)};
    }
  if (std::string_view rest = name; cut_end(rest, ".bias"))
    if (const auto at = rest.rfind(".lora_B."); at != rest.npos && at > 0)
      return {LoraKeyKind::kBias, rest.substr(0, at)};
  return {LoraKeyKind::kUnknown, name};
}

}  // namespace ditfleet::pipeline
