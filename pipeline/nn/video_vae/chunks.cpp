#include "pipeline/nn/video_vae/chunks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/upsample_nearest2d.h>

#include <array>
#include <cmath>
#include <utility>

#include "pipeline/region/programs/channels_last.h"

namespace ditfleet::pipeline {
namespace {

constexpr auto kChannelsLast = c10::MemoryFormat::ChannelsLast;

// [T, C, H, W] to [1, C, T, H, W] and back, without a copy. Channels-last layout stays channels-last layout.
at::Tensor to_video(const at::Tensor& frames) { return frames.transpose(0, 1).unsqueeze(0); }
at::Tensor to_frames(const at::Tensor& video) { return video.squeeze(0).transpose(0, 1); }

at::Tensor last_frames(const at::Tensor& x, std::int64_t count) { return x.narrow(0, x.size(0) - count, count); }

std::int64_t frames_before(const ConvSlot& slot) { return slot.weight.dim() == 5 ? slot.weight.size(2) - 1 : 0; }

// x / |x| over the channels, computed in fp32, × √channels × gamma in x's type.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& gamma) {
  const at::Tensor wide = x.to(c10::ScalarType::Float);
  const at::Tensor length = at::linalg_vector_norm(wide, 2, {1}, /*keepdim=*/true).clamp_min_(1e-12);
  return (wide / length).to(x.scalar_type()).mul_(std::sqrt(static_cast<double>(x.size(1)))).mul_(gamma);
}

// The tensor x + bias. An undefined bias is none: eager convolutions have added theirs.
struct Biased {
  at::Tensor x, bias;
};

class Chunk {
 public:
  explicit Chunk(const ChunkContext& context) : fused_(context.fused), cache_(context.cache) {}

  // Convolves over time and space. Width and height stay; zeros precede the first chunk.
  Biased convolve(const ConvSlot& slot, const at::Tensor& x) {
    const std::int64_t before = frames_before(slot);
    if (before == 0) return product(slot, x);
    if (!fused_) return product(slot, remember(slot, at::cat({past(slot, x), x}, 0)));
    const at::Tensor input = room(slot, x);
    last_frames(input, x.size(0)).copy_(x);
    return product(slot, remember(slot, input));
  }
  // The same of the normalized and activated x.
  Biased convolve_norm(const ConvSlot& slot, const Biased& x, const at::Tensor& gamma) {
    if (!fused_) {
      at::Tensor y = rms_norm(x.x, gamma);
      return convolve(slot, at::silu_(y));
    }
    const at::Tensor input = room(slot, x.x);
    fused_->normalize_pixels(x.x, x.bias, gamma, /*silu=*/true, last_frames(input, x.x.size(0)));
    return product(slot, remember(slot, input));
  }
  // x with its bias added.
  at::Tensor finished(Biased y) const { return y.bias.defined() ? y.x.add_(y.bias.view({1, -1, 1, 1})) : y.x; }

  at::Tensor resnet(const VideoVaeResnet& s, const at::Tensor& x) {
    const Biased inner = convolve_norm(s.conv1, {x, {}}, s.norm1);
    Biased out = convolve_norm(s.conv2, inner, s.norm2);
    const Biased base = s.shortcut ? product(*s.shortcut, x) : Biased{x, {}};
    if (!fused_) return out.x.add_(base.x);
    fused_->add_pixels(base.x, out.x, out.bias, base.bias);
    return out.x;
  }

  // Within frames, with one head.
  at::Tensor attention(const VideoVaeAttention& s, const at::Tensor& x) const {
    const at::Tensor qkv = at::conv2d(norm(x, s.norm), s.qkv.weight, s.qkv.bias)
                               .flatten(2)
                               .transpose(1, 2)
                               .contiguous()
                               .unsqueeze(1);  // [T, 1, H · W, 3 · C]
    const auto parts = qkv.chunk(3, -1);
    const at::Tensor y =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2]).squeeze(1).transpose(1, 2).reshape(x.sizes());
    return in_layout(x + at::conv2d(in_layout(y), s.proj.weight, s.proj.bias));
  }

  at::Tensor upsample(const VideoVaeResample& s, const at::Tensor& x) {
    at::Tensor frames = x;
    if (s.time) {
      // The first chunk yields one frame, and the second one sees zeros instead of it.
      if (const auto [last, first_chunk] = cache_.try_emplace(&*s.time); first_chunk)
        last->second = zeros_before(*s.time, x);
      else
        frames = interleaved(finished(convolve(*s.time, x)));
    }
    const at::Tensor larger =
        fused_ ? fused_->upsample(frames)
               : at::upsample_nearest2d(frames, c10::OptionalArrayRef<std::int64_t>(), std::array<double, 2>{2.0, 2.0});
    return in_layout(at::conv2d(larger, s.conv.weight, s.conv.bias, /*stride=*/1, /*padding=*/1));
  }

  at::Tensor downsample(const VideoVaeResample& s, const at::Tensor& x) {
    const at::Tensor padded = in_layout(at::constant_pad_nd(x, {0, 1, 0, 1}));
    const at::Tensor y = in_layout(at::conv2d(padded, s.conv.weight, s.conv.bias, /*stride=*/2));
    if (!s.time) return y;
    // The first frame passes; it precedes the second chunk.
    const at::Tensor before = std::exchange(cache_[&*s.time], last_frames(y, 1).clone());
    if (!before.defined()) return y;
    return in_layout(to_frames(at::conv3d(to_video(in_layout(at::cat({before, y}, 0))), s.time->weight, s.time->bias,
                                          /*stride=*/{2, 1, 1})));
  }

  at::Tensor middle(const VideoVaeCoder& s, const at::Tensor& x) {
    return resnet(s.mid_second, attention(s.mid_attention, resnet(s.mid_first, x)));
  }

  // Adds to y the level's input x (diffusers' AvgDown3D): each channel is a mean over pixels and channels. Zeros
  // precede a single frame.
  static void add_shrunk(const VideoVaeLevel& level, const at::Tensor& x, const at::Tensor& y) {
    const std::int64_t side = level.resample ? 2 : 1, time = level.resample && level.resample->time ? 2 : 1,
                       t = y.size(0), c = x.size(1), h = y.size(2), w = y.size(3), before = t * time - x.size(0);
    const at::Tensor mean = (before > 0 ? at::constant_pad_nd(x, {0, 0, 0, 0, 0, 0, before, 0}) : x)
                                .view({t, time, c, h, side, w, side})
                                .permute({0, 3, 5, 2, 1, 4, 6})
                                .reshape({t, h, w, y.size(1), c * time * side * side / y.size(1)})
                                .mean(-1);
    y.add_(mean.permute({0, 3, 1, 2}));
  }
  // Adds to y the level's input x (diffusers' DupUp3D): each channel is repeated over pixels and channels. Of a single
  // frame only the last repetition counts.
  static void add_enlarged(const VideoVaeLevel& level, const at::Tensor& x, const at::Tensor& y) {
    const std::int64_t time = level.resample->time ? 2 : 1, t = x.size(0), c = y.size(1), h = x.size(2), w = x.size(3),
                       kept = y.size(0) / t;
    const at::Tensor repeated = x.permute({0, 2, 3, 1})
                                    .unsqueeze(-1)
                                    .expand({t, h, w, x.size(1), c * time * 4 / x.size(1)})
                                    .reshape({t, h, w, c, time, 2, 2})
                                    .narrow(4, time - kept, kept);
    y.view({t, kept, c, h, 2, w, 2}).permute({0, 3, 5, 2, 1, 4, 6}).add_(repeated);
  }

  at::Tensor in_layout(const at::Tensor& x) const { return fused_ ? x.contiguous(kChannelsLast) : x; }

 private:
  Biased product(const ConvSlot& slot, const at::Tensor& input) const {
    const std::int64_t side = slot.weight.size(3) / 2;
    // LibTorch would add the bias in a pass of its own.
    return {in_layout(to_frames(at::conv3d(to_video(input), slot.weight, fused_ ? at::Tensor() : slot.bias,
                                           /*stride=*/1, /*padding=*/{0, side, side}))),
            fused_ ? slot.bias : at::Tensor()};
  }

  at::Tensor norm(const at::Tensor& x, const at::Tensor& gamma) const {
    if (!fused_) return rms_norm(x, gamma);
    at::Tensor y = at::empty(x.sizes(), x.options(), kChannelsLast);
    fused_->normalize_pixels(x, {}, gamma, /*silu=*/false, y);
    return y;
  }

  static at::Tensor zeros_before(const ConvSlot& slot, const at::Tensor& x) {
    return x.new_zeros({frames_before(slot), x.size(1), x.size(2), x.size(3)});
  }
  at::Tensor past(const ConvSlot& slot, const at::Tensor& x) const {
    const auto found = cache_.find(&slot);
    return found != cache_.end() ? found->second : zeros_before(slot, x);
  }
  // The input of the convolution without the frames of x, which are its last ones.
  at::Tensor room(const ConvSlot& slot, const at::Tensor& x) const {
    const std::int64_t before = frames_before(slot);
    at::Tensor input = at::empty({before + x.size(0), x.size(1), x.size(2), x.size(3)}, x.options(), kChannelsLast);
    input.narrow(0, 0, before).copy_(past(slot, x));
    return input;
  }
  at::Tensor remember(const ConvSlot& slot, at::Tensor input) {
    cache_[&slot] = last_frames(input, frames_before(slot)).clone();  // a view would keep all frames in memory
    return input;
  }

  // Channels (2, C) of T frames to C channels of 2 · T frames.
  at::Tensor interleaved(const at::Tensor& x) const {
    const std::int64_t t = x.size(0), c = x.size(1) / 2, h = x.size(2), w = x.size(3);
    if (!fused_) return x.reshape({2 * t, c, h, w});
    return x.permute({0, 2, 3, 1})
        .view({t, h, w, 2, c})
        .permute({0, 3, 1, 2, 4})
        .contiguous()
        .view({2 * t, h, w, c})
        .permute({0, 3, 1, 2});
  }

  const region::ChannelsLast* const fused_;
  FrameCache& cache_;
};

void change_layout(ConvSlot& slot) {
  slot.weight = slot.weight.contiguous(slot.weight.dim() == 5 ? c10::MemoryFormat::ChannelsLast3d
                                                              : c10::MemoryFormat::ChannelsLast);
}

void change_layout(VideoVaeResnet& resnet) {
  change_layout(resnet.conv1);
  change_layout(resnet.conv2);
  if (resnet.shortcut) change_layout(*resnet.shortcut);
}

}  // namespace

void to_channels_last(VideoVaeCoder& coder) {
  change_layout(coder.in);
  change_layout(coder.out);
  change_layout(coder.mid_first);
  change_layout(coder.mid_second);
  change_layout(coder.mid_attention.qkv);
  change_layout(coder.mid_attention.proj);
  for (VideoVaeLevel& level : coder.levels) {
    for (VideoVaeResnet& resnet : level.resnets) change_layout(resnet);
    if (!level.resample) continue;
    change_layout(level.resample->conv);
    if (level.resample->time) change_layout(*level.resample->time);
  }
}

at::Tensor encode_chunk(const VideoVaeCoder& encoder, const at::Tensor& frames, const ChunkContext& context) {
  Chunk chunk(context);
  at::Tensor x = chunk.finished(chunk.convolve(encoder.in, chunk.in_layout(frames)));
  for (const VideoVaeLevel& level : encoder.levels) {
    const at::Tensor before = encoder.residual ? x : at::Tensor();
    for (const VideoVaeResnet& r : level.resnets) x = chunk.resnet(r, x);
    if (level.resample) x = chunk.downsample(*level.resample, x);
    if (before.defined()) Chunk::add_shrunk(level, before, x);
  }
  x = chunk.middle(encoder, x);
  return chunk.finished(chunk.convolve_norm(encoder.out, {x, {}}, encoder.norm_out));
}

at::Tensor decode_chunk(const VideoVaeCoder& decoder, const at::Tensor& latents, const ChunkContext& context) {
  Chunk chunk(context);
  at::Tensor x = chunk.middle(decoder, chunk.finished(chunk.convolve(decoder.in, chunk.in_layout(latents))));
  for (const VideoVaeLevel& level : decoder.levels) {
    const at::Tensor before = decoder.residual && level.resample ? x : at::Tensor();
    for (const VideoVaeResnet& r : level.resnets) x = chunk.resnet(r, x);
    if (level.resample) x = chunk.upsample(*level.resample, x);
    if (before.defined()) Chunk::add_enlarged(level, before, x);
  }
  return chunk.finished(chunk.convolve_norm(decoder.out, {x, {}}, decoder.norm_out));
}

}  // namespace ditfleet::pipeline
