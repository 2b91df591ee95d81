// The names of a FLUX.2 transformer's parameters in files that are not diffusers'.
#pragma once

#include <vector>

#include "pipeline/lora/base.h"

namespace ditfleet::pipeline {

// The names of BFL's original code for diffusers' linears, as diffusers maps them in adapters: also the last
// modulation's, whose halves BFL's code has in the other order.
std::vector<LoraTarget> flux2_aliases(const std::vector<BaseLinear>& transformer);

// diffusers' own names, and those of BFL's code, for adapters of the transformer.
LoraBase flux2_lora_base(std::vector<BaseLinear> transformer);

}  // namespace ditfleet::pipeline
