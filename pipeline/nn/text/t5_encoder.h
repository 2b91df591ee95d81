// The encoders of T5 and UMT5 (transformers T5EncoderModel, UMT5EncoderModel): an embedding for each token of the
// prompt.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/nn/config_file.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/nn/text/activation.h"
#include "pipeline/nn/text/text_encoder.h"

namespace ditfleet::region {
struct RegionHost;
}

namespace ditfleet::pipeline {

struct T5Config {
  std::int64_t vocab_size, d_model, d_kv, d_ff, num_layers, num_heads, relative_attention_num_buckets,
      relative_attention_max_distance;
  double layer_norm_epsilon;
  bool gated;
  bool biases_of_layers;  // UMT5: each layer has its own relative position bias
  Activation activation;
};

// Throws Failure (kDataCorrupt); the message contains file and field.
T5Config read_t5_config(const ConfigFile& file);

// Tensors of which every file of a T5 or UMT5 encoder has one, in transformers' and llama.cpp's names.
inline const std::vector<std::string_view> kT5Tensors{"encoder.block.0.layer.0.SelfAttention.q.weight",
                                                      "enc.blk.0.attn_q.weight"};
inline const std::vector<std::string_view> kT5Prefixes{"text_encoders.t5xxl.transformer.",
                                                       "text_encoders.umt5xxl.transformer."};
// Whether each layer has position biases, as in UMT5.
bool is_umt5(const Checkpoint& weights);

class T5Encoder final : public TextEncoder {
 public:
  // Reads config.json and the weights. `quantize`: empty, or "nf4" (every linear but wo).
  // `regions` computes the values of quantized weights; null: LibTorch. Throws what ConfigFile and Parameters throw.
  static T5Encoder load(const ComponentFiles& from, Placement placement,
                        std::shared_ptr<region::RegionHost> regions = nullptr, const std::string& quantize = {});

  const T5Config& config() const { return config_; }

  // `ids`: padded; padding is attended like any other token. Returns [1, ids.size(), d_model]. Thread-safe.
  at::Tensor encode(const std::vector<std::int32_t>& ids) const;

  std::vector<NamedLinear> named_linears() override;

 private:
  struct Layer {
    at::Tensor norm1, norm2;  // [d_model]
    LinearSlot q, k, v, o;
    LinearSlot wi, wi_gate, wo;  // wi_gate: the branch that is not activated; undefined when not gated
    at::Tensor relative_bias;    // [buckets, heads]; undefined: that of the first layer
  };
  at::Tensor buckets(std::int64_t length) const;  // of the distance of two tokens, [length, length] on the host
  // [1, heads, length, length]
  at::Tensor position_bias(const at::Tensor& table, const at::Tensor& buckets, std::int64_t length) const;
  at::Tensor layer(const at::Tensor& hidden, const Layer& slots, const at::Tensor& bias) const;

  T5Config config_{};
  at::Tensor embedding_;
  std::vector<Layer> layers_;
  at::Tensor final_norm_;
};

}  // namespace ditfleet::pipeline
