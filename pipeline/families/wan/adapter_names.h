// The names of Wan's linears in adapter files.
#pragma once

#include <vector>

#include "pipeline/lora/base.h"

namespace ditfleet::pipeline {

// Linears have their names in diffusers or in Wan's own code (blocks.0.self_attn.q, head.head). There is one component,
// transformer; a file does not say for which of two transformers it is. Weight
// differences apply only to biases and to the head, as in diffusers.
LoraBase wan_lora_base(std::vector<BaseLinear> transformer);

// The name of a linear in Wan's own code: "blocks.7.attn1.to_q" → "blocks.7.self_attn.q". Empty: it has no other name.
std::string wan_own_name(std::string_view name);

}  // namespace ditfleet::pipeline
