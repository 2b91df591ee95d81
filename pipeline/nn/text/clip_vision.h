// CLIP's encoder of pictures (transformers CLIPVisionModel) and its image processor (CLIPImageProcessor).
#pragma once

#include <array>

#include "pipeline/nn/text/clip_layers.h"
#include "pipeline/nn/text/text_encoder.h"
#include "shared/media/media.h"

namespace ditfleet::pipeline {

struct ClipVisionConfig {
  ClipLayersConfig layers;
  std::int64_t image_size, patch_size;

  // Of a picture: one for the whole and one for each patch.
  std::int64_t tokens() const { return 1 + (image_size / patch_size) * (image_size / patch_size); }
};

// Reads the configuration, or its "vision_config" in the file of a complete CLIP. Throws Failure (kDataCorrupt); the
// message contains file and field.
ClipVisionConfig read_clip_vision_config(const ConfigFile& file);

// A preprocessor_config.json: the short side is resized to `short_side` with PIL's bicubic filter on bytes, and the
// middle is cropped to `size` × `size`.
struct ClipProcessorConfig {
  std::int64_t short_side, size;
  std::array<float, 3> mean, std;
};
// Throws Failure (kDataCorrupt); the message contains file and field.
ClipProcessorConfig read_clip_processor_config(const ConfigFile& file);

// [1, 3, size, size] fp32 on the CPU. Takes memory for the picture with its shorter side resized. Thread-safe.
at::Tensor clip_pixels(const media::Media& picture, const ClipProcessorConfig& config);

// Its weights can leave the device, as those of text encoders. Without the last layer, which nothing reads.
class ClipVision final : public TextEncoder {
 public:
  // Reads config.json and the weights. Throws what ConfigFile and Parameters throw.
  static ClipVision load(const ComponentFiles& from, Placement placement);

  std::string component() const override { return "image_encoder"; }
  const ClipVisionConfig& config() const { return config_; }
  // The output of the second to last layer for pixels [N, 3, image_size, image_size] of any type and on any device:
  // [N, tokens(), hidden_size] in the placement's type. Thread-safe.
  at::Tensor hidden(const at::Tensor& pixels) const;

  std::vector<NamedLinear> named_linears() override { return layers_.named_linears(); }

 private:
  ClipVisionConfig config_{};
  at::Tensor class_embedding_, patch_embedding_, position_embedding_;
  NormSlot norm_;
  ClipLayers layers_;
};

}  // namespace ditfleet::pipeline
