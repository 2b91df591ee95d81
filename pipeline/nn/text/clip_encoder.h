// CLIP's text encoder (transformers CLIPTextModel): the pooled embedding of a prompt.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/nn/text/clip_layers.h"
#include "pipeline/nn/text/text_encoder.h"

namespace ditfleet::region {
struct RegionHost;
}

namespace ditfleet::pipeline {

struct ClipConfig {
  ClipLayersConfig layers;
  std::int64_t vocab_size, max_position_embeddings, eos_token_id;
};

// Reads the configuration, or its "text_config" in the file of a complete CLIP. Throws Failure (kDataCorrupt); the
// message contains file and field.
ClipConfig read_clip_config(const ConfigFile& file);

class ClipEncoder final : public TextEncoder {
 public:
  // Reads config.json and the weights. `quantize`: empty, or "nf4" (every linear). `regions`
  // computes the values of quantized weights; null: LibTorch. Throws what ConfigFile and Parameters throw.
  static ClipEncoder load(const ComponentFiles& from, Placement placement,
                          std::shared_ptr<region::RegionHost> regions = nullptr, const std::string& quantize = {});

  const ClipConfig& config() const { return config_; }

  // `ids`: padded, at most max_position_embeddings, each below vocab_size. Other ids throw Failure (kInvalidArgument).
  // Returns the pooled output [1, hidden_size] at the first eos_token_id. If eos_token_id is 2, as in old folders, it
  // is the output at the largest id. Thread-safe.
  at::Tensor pooled(const std::vector<std::int32_t>& ids) const;

  std::vector<NamedLinear> named_linears() override { return layers_.named_linears(); }

 private:
  ClipConfig config_{};
  at::Tensor token_embedding_, position_embedding_;
  ClipLayers layers_;
  NormSlot final_norm_;
};

}  // namespace ditfleet::pipeline
