// The decoder in channels-last layout on a GPU: convolutions by cuDNN, which computes in that layout, everything
// between them by programs of ours.
#pragma once

#include "pipeline/nn/vae/config.h"
#include "pipeline/nn/vae/slots.h"
#include "pipeline/region/programs/channels_last.h"

namespace ditfleet::pipeline {

// The convolutions' weights in that layout, once, after loading.
void to_channels_last(VaeSlots& slots);

// x: latents with scaling and shift undone. See VaeDecoder::decode. Rounds less often than eager mode: a
// convolution's bias is added by what reads the result, in fp32.
at::Tensor decode_channels_last(const VaeConfig& config, const VaeSlots& slots, const region::ChannelsLast& programs,
                                const at::Tensor& x);

}  // namespace ditfleet::pipeline
