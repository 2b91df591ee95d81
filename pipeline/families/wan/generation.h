// One request on its way through Wan's stages.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/engine/generation.h"
#include "pipeline/families/wan/adapters.h"
#include "pipeline/sampling/flow_scheduler.h"

namespace ditfleet::pipeline {

// The fields that Wan reads, with diffusers' defaults.
struct WanRequest {
  std::string prompt, negative_prompt;
  int width = 832, height = 480;
  int num_frames = 81;  // 4k + 1
  double frame_rate = 16;
  int num_inference_steps = 50;
  double guidance_scale = 5;
  std::optional<double> guidance_scale_2;  // none: guidance_scale
  int max_sequence_length = 512;
  std::int64_t seed = 0;
  std::optional<double> flow_shift;  // none: the scheduler's
  std::optional<bool> euler;         // else UniPC; none: the scheduler's
  std::vector<double> sigmas;        // before the shift, without the last 0; empty: computed
  std::vector<LoraRequest> loras;
  bool alone = false;                 // see GenerationRequest
  std::vector<std::string> warnings;  // values that were changed
};

// A number of frames that is not 4k + 1 becomes n / 4 · 4 + 1, with a warning, as in diffusers. Throws Failure
// (kInvalidArgument, with the field) for a value that Wan does not support. Width and height must be multiples of
// `size_multiple`. `experts`: the model has two transformers. `from_image`: it needs an image, which gives the size
// within the default area if the request has none.
WanRequest read_wan_request(const GenerationRequest& request, int size_multiple, bool experts, bool from_image);

// The output of the text encoder for one prompt.
struct WanText {
  std::vector<std::int32_t> ids;  // without padding
  at::Tensor embeds;              // [1, max_sequence_length, text_dim]; zeros after the last id
  std::vector<std::string> warnings;
};

class WanGeneration : public GenerationBase {
 public:
  Result<void> dump(const std::string& path) const override;

  WanRequest request;
  WanAdapters adapters;
  WanText prompt;
  std::optional<WanText> negative;  // with classifier-free guidance
  // The prompts embedded by each transformer, [1, max_sequence_length, inner_dim]; undefined: not used.
  std::array<at::Tensor, 2> text, negative_text;
  FlowSchedulerConfig scheduler;
  Schedule schedule;
  // Mask and encoded image, [1, 4 + channels, latent frames, rows, columns] in the pipeline's type; undefined without
  // an image.
  at::Tensor condition;
  at::Tensor noise;    // [1, channels, latent frames, rows, columns] fp32, on the host
  at::Tensor latents;  // as the noise, on the device; undefined before denoise()
};

}  // namespace ditfleet::pipeline
