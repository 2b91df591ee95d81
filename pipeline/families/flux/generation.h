// One request on its way through FLUX's stages.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/engine/generation.h"
#include "pipeline/families/flux/adapters.h"
#include "pipeline/families/flux/conditioning.h"
#include "pipeline/sampling/schedule.h"

namespace ditfleet::pipeline {

// The fields that FLUX reads, with diffusers' defaults.
struct FluxRequest {
  std::string prompt;
  std::optional<std::string> negative_prompt;
  int width = 1024, height = 1024;
  int num_inference_steps = 28;
  double guidance_scale = 3.5;
  double true_cfg_scale = 1.0;
  int max_sequence_length = 512;
  std::int64_t seed = 0;
  std::vector<LoraRequest> loras;
  bool alone = false;  // see GenerationRequest
};

// Throws Failure (kInvalidArgument, with the field) for a value that FLUX does not support. Width and height must be
// multiples of `size_multiple`.
FluxRequest read_flux_request(const GenerationRequest& request, int size_multiple);

// The output of the text encoders for one prompt.
struct TextEmbedding {
  std::vector<std::int32_t> clip_ids, t5_ids;  // padded
  at::Tensor pooled;                           // [1, pooled_projection_dim]
  at::Tensor tokens;                           // [1, max_sequence_length, joint_attention_dim]
  std::vector<std::string> warnings;
};

class FluxGeneration : public GenerationBase {
 public:
  Result<void> dump(const std::string& path) const override;

  FluxRequest request;
  std::shared_ptr<const AdaptedModels> adapted;  // null: no adapters
  TextEmbedding prompt;
  std::optional<TextEmbedding> negative;  // with true CFG
  Schedule schedule;
  at::Tensor sigmas, timesteps;                                     // the schedule's, on the device
  std::optional<Conditioning> conditioning, negative_conditioning;  // of prompt and negative; set by encode()
  std::int64_t rows = 0, columns = 0;                               // tokens of the image
  at::Tensor noise;                                                 // [1, C, 2·rows, 2·columns], on the host
  at::Tensor latents;  // [1, rows · columns, 4·C], on the device; undefined before denoise()
  at::Tensor image;    // [1, channels, H, W] in [0, 1]; undefined before decode()
};

}  // namespace ditfleet::pipeline
