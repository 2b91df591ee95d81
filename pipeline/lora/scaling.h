// The scale of an adapter's product according to the file's metadata.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/lora/base.h"
#include "pipeline/lora/module_pattern.h"
#include "shared/core/result.h"

namespace ditfleet::pipeline {

// PEFT's configuration, which diffusers saves under the metadata key "lora_adapter_metadata": JSON with the keys of
// LoraConfig, prefixed by the component ("transformer.lora_alpha") or, in a file of a single component, without prefix.
class LoraScaling {
 public:
  // kInvalidArgument (the message lacks the file name): the metadata is not such JSON, or requests DoRA.
  static Result<LoraScaling> parse(const std::map<std::string, std::string>& metadata, const LoraBase& base);

  // The scale of a module: alpha / rank, or alpha / √rank with rslora. `module` is the name without the component.
  // `alpha` comes from the file's tensors. Without any alpha, alpha is 8 (PEFT's default) if the metadata has settings
  // for the component; otherwise the scale is 1. kInvalidArgument (the message lacks the file name): the tensors and
  // the metadata give different alphas, or matching a pattern takes too long.
  Result<double> scale(std::size_t component, std::string_view module, std::int64_t rank,
                       std::optional<double> alpha) const;

 private:
  struct Settings {
    std::optional<double> alpha;
    std::vector<std::pair<ModulePattern, double>> patterns;  // alphas of some modules; the first match counts
    bool rslora = false;
    bool present = false;  // the metadata has settings for this component
  };
  const Settings& of(std::size_t component) const { return components_[component]; }
  std::vector<Settings> components_;
};

}  // namespace ditfleet::pipeline
