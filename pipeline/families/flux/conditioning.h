// What a picture's steps read that depends on its request alone. Made with its text, while another picture is denoised:
// a FLUX's modulation weights are 6 GB to read, and adapters of theirs are products of their own.
#pragma once

#include "pipeline/families/flux/modulation.h"
#include "pipeline/families/flux/transformer.h"

namespace ditfleet::pipeline {

// Steps whose modulation is computed at once: bounds its memory.
inline constexpr std::int64_t kModulationSteps = 64;

struct Conditioning {
  at::Tensor text;             // [1, max_sequence_length, D]: the prompt as the blocks take it
  at::Tensor pooled;           // [1, pooled_projection_dim]
  ModulationTable modulation;  // of the steps from `first_step` on, kModulationSteps at most
  std::int64_t first_step = 0;
};

// tokens and pooled: the text encoders'; timesteps: all of the request's, [steps] fp32 on the device. In a StageScope.
// Throws what LibTorch throws.
Conditioning make_conditioning(const FluxTransformer& flux, const at::Tensor& tokens, const at::Tensor& pooled,
                               const at::Tensor& timesteps, double guidance);

// The rows of a step, after those of the steps before it: in a long schedule the table is made anew now and then.
StepModulation rows_of(Conditioning& conditioning, const FluxTransformer& flux, std::int64_t step,
                       const at::Tensor& timesteps, double guidance);

}  // namespace ditfleet::pipeline
