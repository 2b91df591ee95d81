// What depends on (timestep, guidance, pooled text) alone, for many steps of a request at once: the modulation
// weights are a quarter of a FLUX's parameters and are read once here instead of once a step.
#pragma once

#include <vector>

#include "pipeline/families/flux/slots.h"

namespace ditfleet::pipeline {

// Rows that modulate one normalized activation and gate what comes back. Each [batch, 1, D]; scale is 1 + the
// model's scale.
struct Modulation {
  at::Tensor shift, scale, gate;
};

struct DoubleModulation {
  Modulation image_attention, image_mlp, text_attention, text_mlp;
};

// The rows of one step.
struct StepModulation {
  at::Tensor all;  // [batch, rows, D]: what the others are views of
  std::vector<DoubleModulation> double_blocks;
  std::vector<Modulation> single_blocks;
  Modulation final;  // no gate
};

class ModulationTable {
 public:
  // timesteps: [n] fp32 as the schedule gives them, on the device. guidance: the request's; ignored without
  // guidance_embeds. pooled: [1, pooled_projection_dim]. Timesteps and guidance pass through pooled's type as
  // in diffusers (t / 1000 and back). Takes n · (12·double + 3·single + 2) · D elements of memory.
  ModulationTable(const FluxConfig& config, const FluxSlots& slots, const at::Tensor& timesteps, double guidance,
                  const at::Tensor& pooled);
  StepModulation step(std::int64_t index) const {  // views into the table
    return views(table_.narrow(0, index, 1), double_blocks_, single_blocks_);
  }
  // The rows of a step as they lie one after another: of each double block image, text (6 each), of each single block
  // 3, final 2.
  static StepModulation views(const at::Tensor& all, std::size_t double_blocks, std::size_t single_blocks);

 private:
  std::size_t double_blocks_, single_blocks_;
  at::Tensor table_;  // [n, rows, D]
};

}  // namespace ditfleet::pipeline
