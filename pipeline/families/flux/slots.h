// The parameters of a FLUX transformer as plain structs, one per block. The struct of a compiled block is one row of
// the region's pointer table, with the members in this order.
#pragma once

#include <vector>

#include "pipeline/families/flux/config.h"
#include "pipeline/nn/parameters.h"

namespace ditfleet::pipeline {

// One of the two streams of a double-stream block. D = width.
struct StreamSlots {
  LinearSlot modulation;       // D → 6·D: shift, scale, gate of attention, then of the MLP
  LinearSlot qkv;              // D → 3·D: query, key, value
  at::Tensor norm_q, norm_k;   // [head_dim]
  LinearSlot out;              // D → D
  LinearSlot mlp_in, mlp_out;  // D → 4·D → D
};

struct DoubleBlockSlots {
  StreamSlots image, text;
};

struct SingleBlockSlots {
  LinearSlot modulation;      // D → 3·D: shift, scale, gate
  LinearSlot qkv;             // D → 3·D
  at::Tensor norm_q, norm_k;  // [head_dim]
  LinearSlot mlp_in;          // D → 4·D
  LinearSlot out;             // 5·D → D: attention's output, then the MLP's
};

// Two linears with SiLU between.
struct EmbedderSlots {
  LinearSlot first, second;
};

struct FluxSlots {
  LinearSlot image_in, text_in;          // x_embedder, context_embedder
  EmbedderSlots time, guidance, pooled;  // guidance: undefined tensors without guidance_embeds
  std::vector<DoubleBlockSlots> double_blocks;
  std::vector<SingleBlockSlots> single_blocks;
  LinearSlot final_modulation;  // D → 2·D: scale, shift (in this order, unlike the blocks)
  LinearSlot image_out;
};

// The weights that can leave the device, in the order of their use. Null: they stay.
struct FluxParts {
  std::shared_ptr<PartSequence> modulation;  // of each block
  std::shared_ptr<PartSequence> blocks;      // the other linears of each block
};

// Loads the parameters. Reserves `adapter_rank` columns for adapters next to each linear of the blocks, and three times
// as many for q, k and v. The columns follow the weight, except in the single blocks' mlp_in, where they precede it:
// mlp_in and qkv have the same input. Adds the weights of each block to `parts`. Throws what Parameters and
// PartSequence::add throw.
FluxSlots bind_flux_slots(const FluxConfig& config, Parameters& parameters, std::int64_t adapter_rank = 0,
                          const FluxParts& parts = {});

// The same without weights: of each linear only whether it is quantized, and how (Parameters::format_of).
FluxSlots flux_formats(const FluxConfig& config, const Parameters& parameters);

// For a file in the names of BFL's original code: where each parameter is. Empty for a file in diffusers' names.
FileNames flux_file_names(const FluxConfig& config, const Parameters& parameters);

// Every linear by its name in diffusers. The result points into `slots`.
std::vector<NamedLinear> named_linears(FluxSlots& slots);

}  // namespace ditfleet::pipeline
