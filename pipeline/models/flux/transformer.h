// The FLUX transformer: packed latents and text in, velocity out.
#pragma once

#include <string>

#include "pipeline/models/flux/modulation.h"

namespace ditfleet::pipeline {

class FluxTransformer {
 public:
  // Reads DIR/config.json and the weights beside it. Throws what ConfigFile and Parameters throw.
  static FluxTransformer load(const std::string& dir, Placement placement);

  const FluxConfig& config() const { return config_; }
  const FluxSlots& slots() const { return slots_; }
  std::int64_t bytes() const { return bytes_; }

  // Rows for `timesteps` ([n] fp32, on the device), see ModulationTable.
  ModulationTable modulation(const at::Tensor& timesteps, double guidance, const at::Tensor& pooled) const;
  // Text tokens as the blocks take them: [1, S_text, joint_attention_dim] → [1, S_text, D]. The same for all steps.
  at::Tensor embed_text(const at::Tensor& prompt_embeds) const;
  // latents [1, S_image, in_channels]; text from embed_text; rope from rope_table. Returns [1, S_image, in_channels].
  // Const and thread safe.
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, const StepModulation& modulation,
                      const at::Tensor& rope) const;

 private:
  FluxConfig config_{};
  FluxSlots slots_;
  std::int64_t bytes_ = 0;
};

}  // namespace ditfleet::pipeline
