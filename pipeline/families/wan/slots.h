// The parameters of a Wan transformer as plain structs, one per block.
#pragma once

#include <vector>

#include "pipeline/families/wan/config.h"
#include "pipeline/memory/part_sequence.h"
#include "pipeline/nn/parameters.h"

namespace ditfleet::pipeline {

// D = width. The tables and norm2 are fp32 in every precision.
struct WanBlockSlots {
  at::Tensor table;                       // [1, 6, D]: shift, scale, gate of self-attention, then of the MLP
  LinearSlot qkv;                         // D → 3·D
  at::Tensor norm_q, norm_k;              // [D]
  LinearSlot out;                         // D → D
  NormSlot norm2;                         // undefined without cross_attn_norm
  LinearSlot cross_q, cross_kv;           // D → D, D → 2·D (of the text)
  at::Tensor cross_norm_q, cross_norm_k;  // [D]
  LinearSlot cross_out;                   // D → D
  LinearSlot mlp_in, mlp_out;             // D → ffn_dim → D
};

struct WanSlots {
  LinearSlot patch_in;                 // 4·in_channels → D; the convolution of a patch (C, 1, 2, 2)
  LinearSlot time_first, time_second;  // fp32 in every precision
  LinearSlot time_proj;                // D → 6·D
  LinearSlot text_first, text_second;
  std::vector<WanBlockSlots> blocks;
  at::Tensor table;      // [1, 2, D] fp32: shift, scale
  LinearSlot patch_out;  // D → 4·out_channels, in the order (1, 2, 2, C)
};

// Loads the parameters. Reserves `adapter_rank` columns for adapters next to each linear of the blocks, times the
// number of linears that it stacks. Adds a part with each block's linears to `blocks`. Throws what Parameters throws.
WanSlots bind_wan_slots(const WanConfig& config, Parameters& parameters, PartSequence& blocks,
                        std::int64_t adapter_rank = 0);

// Slots that have only the formats in which bind_wan_slots() would store the blocks' linears. Reads no weights.
WanSlots wan_formats(const WanConfig& config, const Parameters& parameters);

// Every linear by its name in diffusers, except the patch embedding (a convolution). The result points into `slots`.
std::vector<NamedLinear> named_linears(WanSlots& slots);

}  // namespace ditfleet::pipeline
