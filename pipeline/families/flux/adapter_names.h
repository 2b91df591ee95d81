// The names of FLUX's linears in adapter files.
#pragma once

#include <vector>

#include "pipeline/lora/base.h"

namespace ditfleet::pipeline {

// Linears have their names in diffusers, BFL (double_blocks.0.img_attn.qkv, single_blocks.0.linear1) and XLabs
// (double_blocks.0.processor.qkv_lora1). Components: transformer, text_encoder (CLIP), text_encoder_2 (T5).
LoraBase flux_lora_base(std::vector<BaseLinear> transformer, std::vector<BaseLinear> clip, std::vector<BaseLinear> t5);

// The names of BFL and XLabs for these linears of a transformer, each with its rows in order.
std::vector<LoraTarget> flux_aliases(const std::vector<BaseLinear>& transformer);

}  // namespace ditfleet::pipeline
