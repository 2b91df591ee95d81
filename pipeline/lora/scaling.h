// The factor of an adapter's product, where the file's metadata says it.
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

// PEFT's configuration as diffusers keeps it under the metadata key "lora_adapter_metadata": JSON whose keys are those
// of LoraConfig, with the part before them ("transformer.lora_alpha") or, in a file of one model alone, without.
class LoraScaling {
 public:
  // kInvalidArgument (without the file's name) for what is not such JSON or asks for DoRA.
  static Result<LoraScaling> parse(const std::map<std::string, std::string>& metadata);

  // Whether it says an alpha for this part, or for some of its modules. Then alpha tensors beside it would be a second
  // opinion.
  bool gives_alpha(LoraPart part) const { return of(part).alpha.has_value() || !of(part).patterns.empty(); }
  // For a module by its name without the part: alpha / rank, or alpha / √rank with rslora; `alpha` from the file's
  // tensors, if any. Where nobody says an alpha it is 8, PEFT's default, if the metadata says anything of the part, and
  // else the scale is
  // 1. kInvalidArgument (without the file's name): a pattern that takes too long.
  Result<double> scale(LoraPart part, std::string_view module, std::int64_t rank, std::optional<double> alpha) const;

 private:
  struct Settings {
    std::optional<double> alpha;
    std::vector<std::pair<ModulePattern, double>> patterns;  // alphas of some modules; the first that matches counts
    bool rslora = false;
    bool told = false;  // something, whatever it is
  };
  const Settings& of(LoraPart part) const { return parts_[static_cast<std::size_t>(part)]; }
  Settings parts_[3];
};

}  // namespace ditfleet::pipeline
