// The inputs of an image's steps that depend on its request only. They are computed on the text thread while another
// image is denoised, because FLUX's modulation weights are 6 GB and adapters on them need further products.
#pragma once

#include "pipeline/families/flux/modulation.h"
#include "pipeline/families/flux/transformer.h"

namespace ditfleet::pipeline {

// Number of steps whose modulation is computed together. Bounds the memory for it.
inline constexpr std::int64_t kModulationSteps = 64;

struct Conditioning {
  at::Tensor text;             // [1, max_sequence_length, D]: the prompt as input of the blocks
  at::Tensor pooled;           // [1, pooled_projection_dim]
  ModulationTable modulation;  // of at most kModulationSteps steps, starting with `first_step`
  std::int64_t first_step = 0;
};

// `tokens` and `pooled` come from the text encoders. `timesteps`: all of the request, [steps] fp32 on the device. The
// calling thread must be in a StageScope. Throws what LibTorch throws.
Conditioning make_conditioning(const FluxTransformer& flux, const at::Tensor& tokens, const at::Tensor& pooled,
                               const at::Tensor& timesteps, double guidance);

// The rows of a step. Call it for the steps in order. In a long schedule it recomputes the table every kModulationSteps
// steps.
StepModulation rows_of(Conditioning& conditioning, const FluxTransformer& flux, std::int64_t step,
                       const at::Tensor& timesteps, double guidance);

}  // namespace ditfleet::pipeline
