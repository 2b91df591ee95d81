// The decoder of Qwen3 (transformers Qwen3Model) as a text encoder: the hidden states after some of its layers.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/nn/config_file.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/nn/text/activation.h"
#include "pipeline/nn/text/text_encoder.h"

namespace ditfleet::region {
struct RegionHost;
}

namespace ditfleet::pipeline {

struct Qwen3Config {
  std::int64_t vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
      head_dim;
  double rms_norm_eps, rope_theta;
  Activation activation;
};

// Throws Failure (kDataCorrupt); the message contains file and field. Refuses another model_type, sliding windows,
// biases in the attention and scaled rotary embeddings.
Qwen3Config read_qwen3_config(const ConfigFile& file);

// Tensors of which every file of a Qwen3 model has one, in the names of Qwen3ForCausalLM, Qwen3Model and llama.cpp.
inline const std::vector<std::string_view> kQwen3Tensors{
    "model.layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"};
inline const std::vector<std::string_view> kQwen3Prefixes{"text_encoders.qwen3_4b.transformer.",
                                                          "text_encoders.qwen3_8b.transformer."};

class Qwen3Encoder final : public TextEncoder {
 public:
  // Reads config.json, the embedding and the first `layers` layers, and the final norm if these are all. The file may
  // have others and a language model head, which are not read. `quantize`: empty, or "nf4" (every linear). `regions`
  // computes the values of quantized weights; null: LibTorch. Throws what ConfigFile and Parameters throw, and Failure
  // (kDataCorrupt) if the model has fewer layers.
  static Qwen3Encoder load(const ComponentFiles& from, Placement placement, std::int64_t layers,
                           std::shared_ptr<region::RegionHost> regions = nullptr, const std::string& quantize = {});

  const Qwen3Config& config() const { return config_; }

  // The hidden states after each of these numbers of layers, each [1, ids.size(), hidden_size] in the placement's type.
  // 0: the embeddings; at most the loaded layers. Only that of the model's last layer has passed the final norm.
  // `mask`: 0 for padding, else 1; empty: no padding. Positions count padding. A token sees those up to itself that are
  // not padding. If there are none, LibTorch's kernel decides: zeros on a CPU. Throws what token_tensor() throws, and
  // Failure (kInternal) for a mask of another length or more layers than are loaded. Thread-safe.
  std::vector<at::Tensor> encode(const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& mask,
                                 const std::vector<std::int64_t>& after) const;

  std::vector<NamedLinear> named_linears() override;

 private:
  struct Layer {
    at::Tensor norm1, norm2;  // [hidden_size]
    at::Tensor qk_norm;       // of each head of q, then of k: [heads, head_dim]
    LinearSlot qkv, gate_up;  // stacked
    LinearSlot o, down;
  };
  // What all layers of a call share.
  struct Shared {
    at::Tensor cos, sin;                  // [length, 1, head_dim]; the first half of `sin` is negated
    std::optional<at::Tensor> seen = {};  // keys that each query sees, bool [1, 1, length, length]; null: causal
  };
  Shared shared(std::int64_t length, const std::vector<std::int32_t>& mask) const;
  at::Tensor layer(const at::Tensor& hidden, const Layer& slots, const Shared& shared) const;

  Qwen3Config config_{};
  at::Tensor embedding_;
  std::vector<Layer> layers_;
  at::Tensor final_norm_;  // undefined: not all layers are loaded
};

}  // namespace ditfleet::pipeline
