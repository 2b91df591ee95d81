// The names of a Z-Image transformer's parameters in files that are not diffusers'.
#pragma once

#include <vector>

#include "pipeline/lora/base.h"

namespace ditfleet::pipeline {

// The names of the original code for diffusers' linears.
std::vector<LoraTarget> z_image_aliases(const std::vector<BaseLinear>& transformer);

// diffusers' own names, and those of the original code, for adapters of the transformer.
LoraBase z_image_lora_base(std::vector<BaseLinear> transformer);

}  // namespace ditfleet::pipeline
