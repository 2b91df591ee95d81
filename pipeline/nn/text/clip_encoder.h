// CLIP's text encoder (transformers CLIPTextModel): the pooled embedding of a prompt.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pipeline/nn/config_file.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/nn/text/activation.h"

namespace ditfleet::region {
struct RegionHost;
}

namespace ditfleet::pipeline {

class LayerRegion;

struct ClipConfig {
  std::int64_t vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
      max_position_embeddings, eos_token_id;
  double layer_norm_eps;
  Activation activation;
  std::string activation_name;
};

// Throws Failure (kDataCorrupt) naming the file and field. A whole CLIP's config is read at its "text_config".
ClipConfig read_clip_config(const ConfigFile& file);

class ClipEncoder {
 public:
  // Reads DIR/config.json and the weights beside it. With a host that compiles text encoders its layers
  // run as a compiled region. Throws what ConfigFile, Parameters and then LayerRegion throw.
  static ClipEncoder load(const std::string& dir, Placement placement,
                          std::shared_ptr<region::RegionHost> regions = nullptr);

  const ClipConfig& config() const { return config_; }
  std::int64_t bytes() const { return bytes_; }

  // ids: padded, at most max_position_embeddings, each below vocab_size (else Failure, kInvalidArgument).
  // Returns the pooled output [1, hidden_size]: of the first eos_token_id; where the configuration says 2, as
  // old folders do, of the largest id. Const and thread safe.
  at::Tensor pooled(const std::vector<std::int32_t>& ids) const;

  // Every linear of the layers by transformers' name. Points into this encoder: a copy shares its weights with the
  // original, and what is added to the copy's slots (linear.h) is the copy's own.
  std::vector<NamedLinear> named_linears();
  // Without the compiled region, which knows nothing of what was added to slots. Of a copy, its own affair.
  void run_eagerly() { region_ = nullptr; }

 private:
  struct Layer {
    NormSlot norm1, norm2;
    LinearSlot q, k, v, out, fc1, fc2;
  };
  at::Tensor layer(const at::Tensor& hidden, const Layer& slots) const;

  ClipConfig config_{};
  Placement placement_;
  at::Tensor token_embedding_, position_embedding_;
  std::vector<Layer> layers_;
  std::shared_ptr<const LayerRegion> region_;  // null: layers run eagerly
  NormSlot final_norm_;
  std::int64_t bytes_ = 0;
};

}  // namespace ditfleet::pipeline
