// Decoder and encoder in eager mode, as diffusers computes them. They are also the reference for the compiled ones.
#pragma once

#include "pipeline/nn/vae/config.h"
#include "pipeline/nn/vae/slots.h"

namespace ditfleet::pipeline {

// `x`: latents with scaling and shift undone. See ImageVae::decode.
at::Tensor decode_eager(const VaeConfig& config, const VaeSlots& slots, at::Tensor x);
// `x`: pixels. See ImageVae::moments.
at::Tensor encode_eager(const VaeConfig& config, const VaeSlots& slots, at::Tensor x);

}  // namespace ditfleet::pipeline
