// The vision tower of Qwen2.5-VL (transformers Qwen2_5_VisionTransformerPretrainedModel): makes tokens of its decoder
// of a picture.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pipeline/nn/config_file.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/nn/rope.h"
#include "pipeline/nn/text/activation.h"
#include "pipeline/nn/text/picture_tokens.h"
#include "pipeline/nn/text/text_encoder.h"

namespace ditfleet::pipeline {

struct QwenVisionConfig {
  std::int64_t depth, hidden_size, intermediate_size, num_heads, out_hidden_size;
  std::int64_t patch_size, temporal_patch_size;  // pixels of a patch's side, and frames
  std::int64_t merge_size;                       // patches of a token's side
  std::int64_t window_size;                      // pixels of a window's side
  std::vector<std::int64_t> whole;               // blocks whose attention has no windows
  double rope_theta;
  Activation activation;

  std::int64_t head_dim() const { return hidden_size / num_heads; }
  std::int64_t patch_values() const { return 3 * temporal_patch_size * patch_size * patch_size; }
  std::int64_t window_tokens() const { return window_size / merge_size / patch_size; }  // of a window's side
};

// Reads "vision_config" in the config.json of a Qwen2.5-VL model. Throws Failure (kDataCorrupt); the message contains
// file and field.
QwenVisionConfig read_qwen_vision_config(const ConfigFile& file);

class QwenVision final : public TextEncoder {
 public:
  // The arguments are those of QwenEncoder::load(). Throws what ConfigFile and Parameters throw.
  static QwenVision load(const ComponentFiles& from, Placement placement,
                         std::shared_ptr<region::RegionHost> regions = nullptr, const std::string& quantize = {});

  const QwenVisionConfig& config() const { return config_; }

  // `patches`: of QwenProcessor, [rows · columns, patch_values()] of any type, on any device; rows and columns are
  // multiples of merge_size. Returns a token of out_hidden_size values in the placement's type for each merge_size ×
  // merge_size patches, row by row. Thread-safe.
  PictureTokens encode(const PictureTokens& patches) const;

  std::vector<NamedLinear> named_linears() override;

 private:
  struct Block {
    at::Tensor norm1, norm2;  // [hidden_size]
    LinearSlot qkv, proj, gate_up, down;
  };
  // Windows of equal size that follow one another.
  struct Windows {
    std::int64_t count, patches;  // of each
  };
  at::Tensor block(const at::Tensor& hidden, const Block& slots, const HalvesRope& rope,
                   const std::vector<Windows>& windows) const;

  QwenVisionConfig config_{};
  at::Tensor patch_embed_;  // [hidden_size, patch_values()]
  std::vector<Block> blocks_;
  at::Tensor merger_norm_;
  LinearSlot merger_first_, merger_second_;
};

}  // namespace ditfleet::pipeline
