// The AutoencoderKL decoder: latents to pixels.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "pipeline/models/parameters.h"
#include "pipeline/models/vae/config.h"

namespace ditfleet::pipeline {

class VaeDecoder {
 public:
  // Reads DIR/config.json and the decoder's weights beside it; the encoder's are left alone. Throws what
  // ConfigFile and Parameters throw.
  static VaeDecoder load(const std::string& dir, Placement placement);

  const VaeConfig& config() const { return config_; }
  std::int64_t bytes() const { return bytes_; }

  // latents [1, latent_channels, h, w], as the transformer leaves them (unpacked; scaling and shift are undone
  // here). Returns [1, out_channels, h · factor, w · factor], about −1…1. Const and thread safe.
  at::Tensor decode(const at::Tensor& latents) const;

 private:
  struct Resnet {
    NormSlot norm1, norm2;
    ConvSlot conv1, conv2;
    std::optional<ConvSlot> shortcut;  // where the number of channels changes
  };
  struct Attention {  // one head as wide as the channels
    NormSlot norm;
    LinearSlot q, k, v, out;
  };
  struct UpBlock {
    std::vector<Resnet> resnets;
    std::vector<Attention> attentions;  // one after each resnet, or none
    std::optional<ConvSlot> upsample;
  };

  static Resnet bind_resnet(Parameters& p, const std::string& prefix, std::int64_t in, std::int64_t out);
  static Attention bind_attention(Parameters& p, const std::string& prefix, std::int64_t channels);
  at::Tensor norm(const at::Tensor& x, const NormSlot& slot) const;
  at::Tensor resnet(const at::Tensor& x, const Resnet& slots) const;
  at::Tensor attention(const at::Tensor& x, const Attention& slots) const;

  VaeConfig config_{};
  std::optional<ConvSlot> post_quant_;
  ConvSlot in_, out_;
  Resnet mid_first_, mid_second_;
  std::optional<Attention> mid_attention_;
  std::vector<UpBlock> up_;
  NormSlot norm_out_;
  std::int64_t bytes_ = 0;
};

}  // namespace ditfleet::pipeline
