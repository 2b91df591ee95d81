#include "pipeline/nn/video_vae/chunks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/upsample_nearest2d.h>

#include <array>
#include <cmath>
#include <utility>

namespace ditfleet::pipeline {
namespace {

at::Tensor last_frames(const at::Tensor& x, std::int64_t count) { return x.narrow(2, x.size(2) - count, count); }

at::Tensor zero_frames(const at::Tensor& like, std::int64_t count) {
  return like.new_zeros({1, like.size(1), count, like.size(3), like.size(4)});
}

// Convolves over time and space. Width and height stay; zeros precede the first chunk.
at::Tensor causal_conv(const ConvSlot& slot, const at::Tensor& x, FrameCache& cache) {
  const std::int64_t before = slot.weight.size(2) - 1, side = slot.weight.size(3) / 2;
  at::Tensor input = x;
  if (before > 0) {
    at::Tensor& last = cache[&slot];
    input = at::cat({last.defined() ? last : zero_frames(x, before), x}, 2);
    last = last_frames(input, before).clone();  // a view would keep all frames in memory
  }
  return at::conv3d(input, slot.weight, slot.bias, /*stride=*/1, /*padding=*/{0, side, side});
}

// x / |x| over the channels, computed in fp32, × √channels × gamma in x's type.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& gamma) {
  const at::Tensor wide = x.to(c10::ScalarType::Float);
  const at::Tensor length = at::linalg_vector_norm(wide, 2, {1}, /*keepdim=*/true).clamp_min_(1e-12);
  return (wide / length).to(x.scalar_type()).mul_(std::sqrt(static_cast<double>(x.size(1)))).mul_(gamma);
}

at::Tensor norm_silu(const at::Tensor& x, const at::Tensor& gamma) {
  at::Tensor y = rms_norm(x, gamma);
  return at::silu_(y);
}

at::Tensor resnet(const VideoVaeResnet& s, const at::Tensor& x, FrameCache& cache) {
  const at::Tensor inner = causal_conv(s.conv1, norm_silu(x, s.norm1), cache);
  at::Tensor out = causal_conv(s.conv2, norm_silu(inner, s.norm2), cache);
  return out.add_(s.shortcut ? causal_conv(*s.shortcut, x, cache) : x);
}

// [1, C, T, H, W] to [T, C, H, W] and back.
at::Tensor to_images(const at::Tensor& x) { return x.squeeze(0).transpose(0, 1); }
at::Tensor to_video(const at::Tensor& images) { return images.transpose(0, 1).unsqueeze(0); }

// Within frames, with one head.
at::Tensor attention(const VideoVaeAttention& s, const at::Tensor& x) {
  const at::Tensor images = to_images(x);
  const at::Tensor qkv = at::conv2d(rms_norm(images, s.norm), s.qkv.weight, s.qkv.bias)
                             .flatten(2)
                             .transpose(1, 2)
                             .contiguous()
                             .unsqueeze(1);  // [T, 1, H · W, 3 · C]
  const auto parts = qkv.chunk(3, -1);
  const at::Tensor y =
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2]).squeeze(1).transpose(1, 2).reshape(images.sizes());
  return x + to_video(at::conv2d(y, s.proj.weight, s.proj.bias));
}

at::Tensor upsample(const VideoVaeResample& s, const at::Tensor& x, FrameCache& cache) {
  at::Tensor images = to_images(x);
  if (s.time) {
    // The first chunk yields one frame, and the second one sees zeros instead of it.
    if (const auto [last, first_chunk] = cache.try_emplace(&*s.time); first_chunk) {
      last->second = zero_frames(x, s.time->weight.size(2) - 1);
    } else {
      const std::int64_t c = x.size(1), t = x.size(2), h = x.size(3), w = x.size(4);
      images = causal_conv(*s.time, x, cache).view({2, c, t, h, w}).permute({2, 0, 1, 3, 4}).reshape({2 * t, c, h, w});
    }
  }
  const at::Tensor larger =
      at::upsample_nearest2d(images, c10::OptionalArrayRef<std::int64_t>(), std::array<double, 2>{2.0, 2.0});
  return to_video(at::conv2d(larger, s.conv.weight, s.conv.bias, /*stride=*/1, /*padding=*/1));
}

at::Tensor downsample(const VideoVaeResample& s, const at::Tensor& x, FrameCache& cache) {
  const at::Tensor padded = at::constant_pad_nd(to_images(x), {0, 1, 0, 1});
  const at::Tensor y = to_video(at::conv2d(padded, s.conv.weight, s.conv.bias, /*stride=*/2));
  if (!s.time) return y;
  // The first frame passes; it precedes the second chunk.
  const at::Tensor before = std::exchange(cache[&*s.time], last_frames(y, 1).clone());
  return before.defined() ? at::conv3d(at::cat({before, y}, 2), s.time->weight, s.time->bias, /*stride=*/{2, 1, 1}) : y;
}

at::Tensor middle(const VideoVaeCoder& s, const at::Tensor& x, FrameCache& cache) {
  return resnet(s.mid_second, attention(s.mid_attention, resnet(s.mid_first, x, cache)), cache);
}

}  // namespace

at::Tensor encode_chunk(const VideoVaeCoder& encoder, at::Tensor x, FrameCache& cache) {
  x = causal_conv(encoder.in, x, cache);
  for (const VideoVaeLevel& level : encoder.levels) {
    for (const VideoVaeResnet& r : level.resnets) x = resnet(r, x, cache);
    if (level.resample) x = downsample(*level.resample, x, cache);
  }
  x = middle(encoder, x, cache);
  return causal_conv(encoder.out, norm_silu(x, encoder.norm_out), cache);
}

at::Tensor decode_chunk(const VideoVaeCoder& decoder, at::Tensor x, FrameCache& cache) {
  x = middle(decoder, causal_conv(decoder.in, x, cache), cache);
  for (const VideoVaeLevel& level : decoder.levels) {
    for (const VideoVaeResnet& r : level.resnets) x = resnet(r, x, cache);
    if (level.resample) x = upsample(*level.resample, x, cache);
  }
  return causal_conv(decoder.out, norm_silu(x, decoder.norm_out), cache);
}

}  // namespace ditfleet::pipeline
