// The layers that CLIP's encoders of text and of pictures share (transformers CLIPEncoder).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/nn/config_file.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/nn/text/activation.h"

namespace ditfleet::pipeline {

struct ClipLayersConfig {
  std::int64_t hidden_size, intermediate_size, num_hidden_layers, num_attention_heads;
  double layer_norm_eps;
  Activation activation;
};

// Reads the configuration of either encoder. Of fields that the file lacks, hidden_size, intermediate_size and
// num_attention_heads have the values of `otherwise`. Throws Failure (kDataCorrupt); the message contains file and
// field.
ClipLayersConfig read_clip_layers_config(const ConfigFile& file, const ClipLayersConfig& otherwise);

class ClipLayers {
 public:
  // Loads the first `count` layers; `prefix`: "encoder.layers.". Throws what Parameters throw.
  static ClipLayers load(Parameters& parameters, const std::string& prefix, const ClipLayersConfig& config,
                         std::int64_t count);

  // All layers of `hidden` [N, tokens, hidden_size]. `causal`: a token attends only to itself and those before it.
  // Thread-safe.
  at::Tensor run(at::Tensor hidden, bool causal) const;

  // Every linear as "encoder.layers.0.mlp.fc1". The result points into these layers.
  std::vector<NamedLinear> named_linears();
  // Adds all weights to those of a part.
  void add_to(std::vector<const LinearSlot*>& linears, std::vector<at::Tensor>& tensors) const;

 private:
  struct Layer {
    NormSlot norm1, norm2;
    LinearSlot q, k, v, out, fc1, fc2;
  };

  ClipLayersConfig config_{};
  std::vector<Layer> layers_;
};

}  // namespace ditfleet::pipeline
