// The modulation, which depends on timestep, guidance and pooled text only. It is computed for many steps at a time:
// its weights are a quarter of FLUX's parameters and are then read once instead of once per step.
#pragma once

#include <vector>

#include "pipeline/families/flux/parameters.h"

namespace ditfleet::pipeline {

// Modulates one normalized activation and gates the result of its branch. Each tensor is [batch, 1, D]. `scale` is 1 +
// the model's scale.
struct Modulation {
  at::Tensor shift, scale, gate;
};

struct DoubleModulation {
  Modulation image_attention, image_mlp, text_attention, text_mlp;
};

// The rows of one step.
struct StepModulation {
  at::Tensor all;  // [batch, rows, D]; the other members are views of it
  std::vector<DoubleModulation> double_blocks;
  std::vector<Modulation> single_blocks;
  Modulation final;  // no gate
};

class ModulationTable {
 public:
  // `timesteps`: [n] fp32 of the schedule, on the device. `guidance` is ignored without guidance_embeds. `pooled`: [1,
  // pooled_projection_dim]. Timesteps / 1000 and guidance are rounded to pooled's type, as in diffusers. The table has
  // n · (12·double + 3·single + 2) · D elements. `parts`: TransformerParts::apart.
  ModulationTable(const FluxConfig& config, const TransformerWeights& weights, const at::Tensor& timesteps,
                  double guidance, const at::Tensor& pooled, PartSequence* parts = nullptr);
  StepModulation step(std::int64_t index) const {  // views into the table
    return views(table_.narrow(0, index, 1), config_);
  }
  // Splits the rows of a step. Their order: 6 for image and 6 for text of each double block, 3 of each single block, 2
  // of the final norm.
  static StepModulation views(const at::Tensor& all, const FluxConfig& config);

 private:
  FluxConfig config_;
  at::Tensor table_;  // [n, rows, D]
};

}  // namespace ditfleet::pipeline
