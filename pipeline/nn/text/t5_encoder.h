// T5's encoder (transformers T5EncoderModel): an embedding for each token of the prompt.
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

struct T5Config {
  std::int64_t vocab_size, d_model, d_kv, d_ff, num_layers, num_heads, relative_attention_num_buckets,
      relative_attention_max_distance;
  double layer_norm_epsilon;
  bool gated;
  Activation activation;
  std::string activation_name;
};

// Throws Failure (kDataCorrupt) naming the file and field.
T5Config read_t5_config(const ConfigFile& file);

class T5Encoder {
 public:
  // Reads DIR/config.json and the weights beside it. With a host that compiles text encoders its layers
  // run as a compiled region. Throws what ConfigFile, Parameters and then LayerRegion throw.
  static T5Encoder load(const std::string& dir, Placement placement,
                        std::shared_ptr<region::RegionHost> regions = nullptr);

  const T5Config& config() const { return config_; }
  std::int64_t bytes() const { return bytes_; }

  // ids: padded; padding is attended like any other token. Returns [1, ids.size(), d_model].
  // Const and thread safe.
  at::Tensor encode(const std::vector<std::int32_t>& ids) const;

  // Every linear of the layers by transformers' name. Points into this encoder: a copy shares its weights with the
  // original, and what is added to the copy's slots (linear.h) is the copy's own.
  std::vector<NamedLinear> named_linears();
  // Without the compiled region, which knows nothing of what was added to slots. Of a copy, its own affair.
  void run_eagerly() { region_ = nullptr; }

 private:
  struct Layer {
    at::Tensor norm1, norm2;  // [d_model]
    LinearSlot q, k, v, o;
    LinearSlot wi, wi_gate, wo;  // wi_gate: the branch that is not activated; undefined when not gated
  };
  at::Tensor position_bias(std::int64_t length) const;  // [1, heads, length, length]
  at::Tensor layer(const at::Tensor& hidden, const Layer& slots, const at::Tensor& bias) const;

  T5Config config_{};
  Placement placement_;
  at::Tensor embedding_, relative_bias_;
  std::vector<Layer> layers_;
  std::shared_ptr<const LayerRegion> region_;  // null: layers run eagerly
  at::Tensor final_norm_;
  std::int64_t bytes_ = 0;
};

}  // namespace ditfleet::pipeline
