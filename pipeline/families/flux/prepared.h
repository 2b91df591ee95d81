// One picture on its way through the stages.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/engine.h"
#include "pipeline/families/flux/adapters.h"
#include "pipeline/families/flux/conditioning.h"
#include "pipeline/sampling/schedule.h"

namespace ditfleet::pipeline {

// What the text encoders made of one prompt.
struct TextEmbedding {
  std::vector<std::int32_t> clip_ids, t5_ids;  // padded
  at::Tensor pooled;                           // [1, pooled_projection_dim]
  at::Tensor tokens;                           // [1, max_sequence_length, joint_attention_dim]
  std::vector<std::string> warnings;
};

// Handed from stage to stage; one stage at a time touches it. phases_us() and warnings() may be called between
// stages.
class FluxPrepared : public Prepared {
 public:
  std::vector<std::string> warnings() const override { return warnings_; }
  std::vector<std::pair<std::string, std::int64_t>> phases_us() const override { return phases_; }
  Result<void> dump(const std::string& path) const override;

  // Adds the time since `start` to the phase of this name.
  void add_phase(const std::string& name, std::chrono::steady_clock::time_point start);

  ImageRequest request;
  std::shared_ptr<const AdaptedModels> adapted;  // null: the folder as it is
  TextEmbedding prompt;
  std::optional<TextEmbedding> negative;  // with true CFG
  Schedule schedule;
  at::Tensor sigmas, timesteps;  // the schedule's, on the device
  std::optional<Conditioning> conditioning,
      negative_conditioning;           // there after encode(), as far as prompt and negative are
  std::int64_t rows = 0, columns = 0;  // tokens of the picture
  at::Tensor noise;                    // [1, C, 2·rows, 2·columns], on the host
  at::Tensor latents;                  // [1, rows · columns, 4·C], on the device; undefined before denoise()
  at::Tensor image;                    // [1, channels, H, W] in [0, 1]; undefined before decode()

  std::vector<std::string> warnings_;

 private:
  std::vector<std::pair<std::string, std::int64_t>> phases_;
};

}  // namespace ditfleet::pipeline
