#include "pipeline/lora/scaling.h"

#include <algorithm>
#include <cmath>

#include "shared/core/excerpt.h"
#include "shared/core/json.h"
#include "shared/safetensors/peft_folder.h"

namespace ditfleet::pipeline {
namespace {

constexpr const char* kKey = safetensors::kAdapterConfig;
constexpr double kPeftsAlpha =
    8;  // peft 0.21.2, LoraConfig.lora_alpha; diffusers 0.42.1 builds one per component that the metadata mentions

Error wrong(const std::string& key, const json::value& value, const std::string& right) {
  return invalid_argument(std::string("its ") + kKey + " says " + key + " is " + excerpt(json::serialize(value), 60) +
                          "; it must be " + right);
}

Error wrong_pattern(const std::string& key, const Error& why) {
  return invalid_argument(std::string("its ") + kKey + " is invalid at " + key + ": " + why.message);
}

std::optional<double> finite_number(const json::value& value) {
  boost::system::error_code ec;
  const double number = value.to_number<double>(ec);
  if (ec || !std::isfinite(number)) return {};
  return number;
}

}  // namespace

Result<LoraScaling> LoraScaling::parse(const std::map<std::string, std::string>& metadata, const LoraBase& base) {
  LoraScaling scaling;
  scaling.components_.resize(base.components.size());
  const auto text = metadata.find(kKey);
  if (text == metadata.end()) return scaling;
  const auto parsed = parse_json(text->second);
  if (!parsed) return invalid_argument(std::string("its ") + kKey + " is not JSON: " + parsed.error().message);
  const json::object* fields = parsed->if_object();
  if (!fields) return invalid_argument(std::string("its ") + kKey + " must be a JSON object");
  const auto prefix_of = [](const LoraComponent& component) { return component.name + "."; };
  const auto has_component = [&](std::string_view key) {
    return std::any_of(base.components.begin(), base.components.end(),
                       [&](const LoraComponent& component) { return key.starts_with(prefix_of(component)); });
  };
  for (std::size_t component = 0; component < base.components.size(); ++component) {
    const std::string prefix = prefix_of(base.components[component]);
    Settings& s = scaling.components_[component];
    for (const auto& [name, value] : *fields) {
      std::string_view key = name;
      if (key.starts_with(prefix))
        key.remove_prefix(prefix.size());
      else if (component != 0 || has_component(key))
        continue;  // a key without a component belongs to the first
      s.present = true;
      if (value.is_null()) continue;
      const std::string shown(name);
      if (key == "lora_alpha") {
        if (!(s.alpha = finite_number(value))) return wrong(shown, value, "a finite number");
      } else if (key == "use_rslora" || key == "use_dora") {
        const bool* flag = value.if_bool();
        if (!flag) return wrong(shown, value, "true or false");
        if (key == "use_dora" && *flag)
          return invalid_argument("it is a DoRA adapter (use_dora); only plain LoRA can be applied");
        if (key == "use_rslora") s.rslora = *flag;
      } else if (key == "alpha_pattern") {
        const json::object* patterns = value.if_object();
        if (!patterns) return wrong(shown, value, "an object of numbers");
        for (const auto& [pattern, alpha] : *patterns) {
          const auto number = finite_number(alpha);
          if (!number) return wrong(shown + "." + excerpt(std::string_view(pattern), 60), alpha, "a finite number");
          auto parsed_pattern = ModulePattern::parse(pattern);
          if (!parsed_pattern) return wrong_pattern(shown, parsed_pattern.error());
          s.patterns.emplace_back(std::move(*parsed_pattern), *number);
        }
      }
    }
  }
  return scaling;
}

Result<double> LoraScaling::scale(std::size_t component, std::string_view module, std::int64_t rank,
                                  std::optional<double> alpha) const {
  const Settings& s = of(component);
  std::optional<double> said = s.alpha;
  for (const auto& [pattern, value] : s.patterns) {
    const auto matches = pattern.matches(module);
    if (!matches) return wrong_pattern("alpha_pattern", matches.error());
    if (!*matches) continue;
    said = value;
    break;
  }
  // SimpleTuner saves both.
  if (alpha && said && static_cast<float>(*alpha) != static_cast<float>(*said))
    return invalid_argument("the alpha of " + excerpt(std::string(module), 120) +
                            " is one number in a tensor and another in " + kKey + "; remove one of them");
  if (!alpha) alpha = said;
  if (!alpha && s.present) alpha = kPeftsAlpha;
  if (!alpha) return 1;
  const auto r = static_cast<double>(rank);
  return *alpha / (s.rslora ? std::sqrt(r) : r);
}

}  // namespace ditfleet::pipeline
