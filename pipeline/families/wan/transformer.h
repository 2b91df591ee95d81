// Wan's transformer (diffusers WanTransformer3DModel): latents, timestep and text to a velocity. Eager.
#pragma once

#include "pipeline/families/wan/slots.h"

namespace ditfleet::pipeline {

// Immutable after loading; copies share the weights. The functions may be called from any thread.
class WanTransformer {
 public:
  // Reads config.json and the weights in `dir`. `name`: of the blocks' parts. Throws what ConfigFile and Parameters
  // throw.
  static WanTransformer load(const std::string& dir, Placement placement, const std::string& name = "transformer");

  // A copy with other parameter structs: those of this transformer with terms of adapters added.
  WanTransformer adapted(WanSlots slots) const;

  const WanConfig& config() const { return config_; }
  const WanSlots& slots() const { return slots_; }
  PartSequence& parts() const { return *parts_; }  // one for each block
  std::int64_t bytes() const { return bytes_; }

  // Converts prompt_embeds [1, L, text_dim] to the blocks' input [1, L, D]. The same for all steps.
  at::Tensor embed_text(const at::Tensor& prompt_embeds) const;
  // The table that velocity() needs for latents [1, C, frames, rows, columns]. Throws what wan_rope_table throws.
  at::Tensor rope(std::int64_t frames, std::int64_t rows, std::int64_t columns) const;
  // `latents`: [1, in_channels, F, h, w] with even h and w; rounded to the model's type. `timestep`: 0 to 1000, not
  // rounded. `text`: from embed_text(). `rope`: from rope(). Returns [1, out_channels, F, h, w] in the model's type.
  // Throws Failure (kInvalidArgument) for another shape.
  at::Tensor velocity(const at::Tensor& latents, double timestep, const at::Tensor& text, const at::Tensor& rope) const;

 private:
  WanConfig config_{};
  WanSlots slots_;
  std::shared_ptr<PartSequence> parts_;
  std::int64_t bytes_ = 0;
  Placement placement_;
};

}  // namespace ditfleet::pipeline
