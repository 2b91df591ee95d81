// Encodes and decodes one chunk of frames in eager mode, as diffusers computes it. Convolutions over time see only
// earlier frames, so a video is a sequence of chunks, and memory does not depend on its length.
#pragma once

#include <unordered_map>

#include "pipeline/nn/video_vae/slots.h"

namespace ditfleet::pipeline {

// The last input frames of each convolution over time. Empty before the first chunk. Belongs to one video and to the
// slots that it was used with.
using FrameCache = std::unordered_map<const ConvSlot*, at::Tensor>;

// `x`: [1, 3, n, H, W], where n is 1 in the first chunk and 4 later. Returns [1, 2 · z_dim, 1, h, w].
at::Tensor encode_chunk(const VideoVaeCoder& encoder, at::Tensor x, FrameCache& cache);

// `x`: one latent frame, [1, z_dim, 1, h, w]. Returns [1, 3, n, H, W], where n is 1 in the first chunk and 4 later.
at::Tensor decode_chunk(const VideoVaeCoder& decoder, at::Tensor x, FrameCache& cache);

}  // namespace ditfleet::pipeline
