// AutoencoderKL: latents to pixels and, if the file has the encoder, pixels to latents.
#pragma once

#include <memory>
#include <string>

#include "pipeline/nn/vae/config.h"
#include "pipeline/nn/vae/slots.h"

namespace ditfleet::region {
struct RegionHost;
class ChannelsLast;
}  // namespace ditfleet::region

namespace ditfleet::pipeline {

struct ComponentFiles;

class ImageVae {
 public:
  // Reads config.json and the weights. `regions` null: runs eagerly. Throws what ConfigFile, Parameters and
  // region::make_channels_last throw.
  static ImageVae load(const ComponentFiles& from, Placement placement,
                       std::shared_ptr<region::RegionHost> regions = nullptr);
  // Uses parameters that are already loaded.
  ImageVae(const VaeConfig& config, VaeSlots slots, std::shared_ptr<region::RegionHost> regions);

  const VaeConfig& config() const { return config_; }
  std::int64_t bytes() const { return bytes_; }

  // AutoencoderKLFlux2: undoes the normalization of latents [N, 4 · latent_channels, h, w] whose pixels are 2 × 2, in
  // their type. Thread-safe.
  at::Tensor denormalized(const at::Tensor& latents) const;
  // `latents`: [N, latent_channels, h, w], unpacked; decode() undoes scaling and shift. Returns [N, out_channels,
  // h · factor, w · factor], values of about −1 to 1, in any layout. Thread-safe.
  at::Tensor decode(const at::Tensor& latents) const;
  // The mean and the logarithm of the variance of the latents of a picture [1, 3, H, W] with values of −1 to 1, whose
  // sides are multiples of factor(): [1, 2 · latent_channels, H / factor, W / factor] in their type.
  // Thread-safe. Throws Failure (kInvalidArgument): the file has no encoder.
  at::Tensor moments(const at::Tensor& pixels) const;
  // Latents as the transformer sees them: the mean, or a sample with `noise` of their shape if it is defined; shifted
  // and scaled.
  at::Tensor latents(const at::Tensor& moments, const at::Tensor& noise) const;
  // AutoencoderKLFlux2: the inverse of denormalized().
  at::Tensor normalized(const at::Tensor& latents) const;
  // A small picture of the latents.
  at::Tensor preview(const at::Tensor& latents) const;

 private:
  VaeConfig config_{};
  VaeSlots slots_;
  std::shared_ptr<const VaeSlots> encoder_;  // null: the file has none
  std::int64_t bytes_ = 0;
  std::shared_ptr<const region::ChannelsLast> channels_last_;  // null: eager
};

}  // namespace ditfleet::pipeline
