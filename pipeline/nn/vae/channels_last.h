// Decoder and encoder in channels-last layout on a GPU: convolutions by cuDNN, everything between them by our own
// kernels.
#pragma once

#include "pipeline/nn/vae/config.h"
#include "pipeline/nn/vae/slots.h"
#include "pipeline/region/programs/channels_last.h"

namespace ditfleet::pipeline {

// Converts the weights of the convolutions to channels-last layout. Call it once, after loading.
void to_channels_last(VaeSlots& slots);

// `x`: latents with scaling and shift undone. See ImageVae::decode. Rounds less often than eager mode: the kernel
// that reads the result of a convolution adds the bias, in fp32.
at::Tensor decode_channels_last(const VaeConfig& config, const VaeSlots& slots, const region::ChannelsLast& programs,
                                const at::Tensor& x);
// `x`: pixels. See ImageVae::moments.
at::Tensor encode_channels_last(const VaeConfig& config, const VaeSlots& slots, const region::ChannelsLast& programs,
                                const at::Tensor& x);

// A convolution that halves the sides, after a row and a column of zeros at the end, as diffusers' Downsample2D without
// padding.
at::Tensor half_as_large(const at::Tensor& x, const ConvSlot& slot);

}  // namespace ditfleet::pipeline
