// Encodes and decodes one chunk of frames. Convolutions over time see only earlier frames, so a video is a sequence of
// chunks, and memory does not depend on its length.
#pragma once

#include <unordered_map>

#include "pipeline/nn/video_vae/slots.h"

namespace ditfleet::region {
class ChannelsLast;
}

namespace ditfleet::pipeline {

// The last input frames of each convolution over time. Empty before the first chunk. Belongs to one video and to the
// slots that it was used with.
using FrameCache = std::unordered_map<const ConvSlot*, at::Tensor>;

// How a chunk is computed. `fused`: in channels-last layout by cuDNN and our own kernels; the weights must be in that
// layout (to_channels_last). It rounds less often than eager mode: the kernel that reads the result of a convolution
// adds the bias, in fp32. Null: by LibTorch's operators, with diffusers' roundings.
struct ChunkContext {
  const region::ChannelsLast* fused;
  FrameCache& cache;
};

// Converts the weights of the convolutions to channels-last layout. Call it once, after loading.
void to_channels_last(VideoVaeCoder& coder);

// Chunks are [frames, channels, height, width]; C: the channels of a patch.
// `x`: [n, C, H, W], where n is 1 in the first chunk and 4 later. Returns [1, 2 · z_dim, h, w].
at::Tensor encode_chunk(const VideoVaeCoder& encoder, const at::Tensor& x, const ChunkContext& context);
// `x`: one latent frame, [1, z_dim, h, w]. Returns [n, C, H, W], where n is 1 in the first chunk and 4 later.
at::Tensor decode_chunk(const VideoVaeCoder& decoder, const at::Tensor& x, const ChunkContext& context);

}  // namespace ditfleet::pipeline
