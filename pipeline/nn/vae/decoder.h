// The AutoencoderKL decoder: latents to pixels.
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

class VaeDecoder {
 public:
  // Reads config.json and the decoder's weights; ignores the encoder's weights. `regions` null: runs eagerly.
  // Throws what ConfigFile, Parameters and region::make_channels_last throw.
  static VaeDecoder load(const ComponentFiles& from, Placement placement,
                         std::shared_ptr<region::RegionHost> regions = nullptr);
  // Uses parameters that are already loaded.
  VaeDecoder(const VaeConfig& config, VaeSlots slots, std::shared_ptr<region::RegionHost> regions);

  const VaeConfig& config() const { return config_; }
  std::int64_t bytes() const { return bytes_; }

  // AutoencoderKLFlux2: undoes the normalization of latents [N, 4 · latent_channels, h, w] whose pixels are 2 × 2, in
  // their type. Thread-safe.
  at::Tensor denormalized(const at::Tensor& latents) const;
  // `latents`: [N, latent_channels, h, w], unpacked; decode() undoes scaling and shift. Returns [N, out_channels,
  // h · factor, w · factor], values of about −1 to 1, in any layout. Thread-safe.
  at::Tensor decode(const at::Tensor& latents) const;
  // A small picture of the latents.
  at::Tensor preview(const at::Tensor& latents) const;

 private:
  VaeConfig config_{};
  VaeSlots slots_;
  std::int64_t bytes_ = 0;
  std::shared_ptr<const region::ChannelsLast> channels_last_;  // null: eager
};

}  // namespace ditfleet::pipeline
