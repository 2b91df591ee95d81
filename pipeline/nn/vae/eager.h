// The decoder in eager mode, as diffusers computes it. It is also the reference for the compiled decoder.
#pragma once

#include "pipeline/nn/vae/config.h"
#include "pipeline/nn/vae/slots.h"

namespace ditfleet::pipeline {

// `x`: latents with scaling and shift undone. See VaeDecoder::decode.
at::Tensor decode_eager(const VaeConfig& config, const VaeSlots& slots, at::Tensor x);

}  // namespace ditfleet::pipeline
