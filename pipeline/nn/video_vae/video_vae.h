// A causal video VAE (diffusers AutoencoderKLWan): latents to frames, chunk by chunk, and frames to latents.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "pipeline/nn/video_vae/config.h"
#include "pipeline/nn/video_vae/slots.h"

namespace ditfleet::region {
class ChannelsLast;
struct RegionHost;
}  // namespace ditfleet::region

namespace ditfleet::pipeline {

struct ComponentFiles;

// Thread-safe once loaded. Call decode() and encode() in inference mode.
class VideoVae {
 public:
  // Reads config.json and the weights. Without the encoder its weights are not read. The VAE computes in the
  // placement's type. `regions`: as for ImageVae; null: eager. Throws what ConfigFile and Parameters throw.
  static VideoVae load(const ComponentFiles& from, Placement placement, bool with_encoder,
                       std::shared_ptr<region::RegionHost> regions = nullptr);

  const VideoVaeConfig& config() const { return config_; }
  std::int64_t bytes() const { return bytes_; }  // of the weights, on the device

  // `latents`: [1, z_dim, F, h, w], normalized, of any type and on any device. Calls `on_frames` on the calling thread
  // for each latent frame in order, with frames [1, 3, n, h · factor, w · factor] in [-1, 1] of the placement's type:
  // one frame first, then four. On a GPU the frames may still be in the queue of the current stream. What `on_frames`
  // throws ends the decoding. Throws Failure (kInvalidArgument) for another shape.
  void decode(const at::Tensor& latents, const std::function<void(const at::Tensor& frames)>& on_frames) const;

  // `video`: [1, 3, 4 · k + 1, H, W] in [-1, 1], of any type and on any device; H and W are multiples of the spatial
  // factor. Returns the normalized mode, [1, z_dim, k + 1, h, w] in fp32 on the placement's device. Throws Failure
  // (kInvalidArgument) for another shape. Requires the encoder.
  at::Tensor encode(const at::Tensor& video) const;

 private:
  VideoVaeConfig config_{};
  Placement placement_;
  VideoVaeSlots slots_;
  std::shared_ptr<const region::ChannelsLast> fused_;  // null: eager
  at::Tensor mean_, std_;                              // [1, z_dim, 1, 1, 1], fp32
  std::int64_t bytes_ = 0;
};

}  // namespace ditfleet::pipeline
