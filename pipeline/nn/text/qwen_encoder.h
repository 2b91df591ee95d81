// The decoders of Qwen3 and Qwen2.5-VL (transformers Qwen3Model and Qwen2_5_VLTextModel) as text encoders: the hidden
// states after some of their layers.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/nn/config_file.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/nn/rope.h"
#include "pipeline/nn/text/activation.h"
#include "pipeline/nn/text/picture_tokens.h"
#include "pipeline/nn/text/text_encoder.h"

namespace ditfleet::region {
struct RegionHost;
}

namespace ditfleet::pipeline {

struct QwenConfig {
  std::int64_t vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
      head_dim;
  double rms_norm_eps, rope_theta;
  Activation activation;
  bool bias = false, qk_norm = true;             // of q, k and v; of Qwen3
  std::vector<std::int64_t> mrope_section = {};  // frequencies of time, row and column in turn; empty: one axis
  std::int32_t image_token = -1;                 // the id that pictures replace; -1: it takes none
};

// Throws Failure (kDataCorrupt); the message contains file and field. Refuses another model_type, sliding windows,
// biases in the attention and scaled rotary embeddings.
QwenConfig read_qwen3_config(const ConfigFile& file);
// The same of Qwen2.5-VL. Its decoder's fields are in "text_config", or in older files beside the others.
QwenConfig read_qwen25_vl_config(const ConfigFile& file);

// Tensors of which every file of a model has one, in the names of transformers' classes and releases, and llama.cpp's.
inline const std::vector<std::string_view> kQwen3Tensors{
    "model.layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"};
inline const std::vector<std::string_view> kQwen3Prefixes{"text_encoders.qwen3_4b.transformer.",
                                                          "text_encoders.qwen3_8b.transformer."};
inline const std::vector<std::string_view> kQwen25VlTensors{
    "model.layers.0.self_attn.q_proj.bias", "model.language_model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"};
inline const std::vector<std::string_view> kQwen25VlPrefixes{"text_encoders.qwen25_7b.transformer."};

class QwenEncoder final : public TextEncoder {
 public:
  // Reads config.json, the embedding and the first `layers` layers, and the final norm if these are all. The file may
  // have others, a vision tower and a language model head, which are not read. `quantize`: empty, or "nf4" (every
  // linear). `regions` computes the values of quantized weights; null: LibTorch. Throws what ConfigFile and Parameters
  // throw, and Failure (kDataCorrupt) if the model has fewer layers.
  static QwenEncoder load(const ComponentFiles& from, Placement placement, std::int64_t layers,
                          std::shared_ptr<region::RegionHost> regions = nullptr, const std::string& quantize = {});

  const QwenConfig& config() const { return config_; }

  // The hidden states after each of these numbers of layers, each [1, ids.size(), hidden_size] in the placement's type.
  // 0: the embeddings; at most the loaded layers. Only that of the model's last layer has passed the final norm.
  // `mask`: 0 for padding, else 1; empty: no padding. Positions count padding. A token sees those up to itself that are
  // not padding. If there are none, LibTorch's kernel decides: zeros on a CPU.
  // `pictures`: of QwenVision; their tokens replace the embeddings of image_token in order. Without any, image_token is
  // a token as others. `axes`: positions are (time, row, column), as transformers computes them if it gets
  // mm_token_type_ids and image_grid_thw; else 0, 1, 2 … also for pictures, as in diffusers' pipelines.
  // Throws what token_tensor() throws, and Failure (kInternal) for a mask of another length, more layers than are
  // loaded, or another number of image tokens than the pictures have. Thread-safe.
  std::vector<at::Tensor> encode(const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& mask,
                                 const std::vector<std::int64_t>& after, std::span<const PictureTokens> pictures = {},
                                 bool axes = false) const;

  std::vector<NamedLinear> named_linears() override;

 private:
  struct Layer {
    at::Tensor norm1, norm2;  // [hidden_size]
    at::Tensor qk_norm;       // of each head of q, then of k: [heads, head_dim]; undefined: none
    LinearSlot qkv, gate_up;  // stacked
    LinearSlot o, down;
  };
  // What all layers of a call share.
  struct Shared {
    HalvesRope rope;
    std::optional<at::Tensor> seen = {};  // keys that each query sees, bool [1, 1, length, length]; null: causal
  };
  Shared shared(const at::Tensor& angles, const std::vector<std::int32_t>& mask) const;
  at::Tensor angles(const std::vector<std::int32_t>& ids, std::span<const PictureTokens> pictures) const;
  at::Tensor layer(const at::Tensor& hidden, const Layer& slots, const Shared& shared) const;

  QwenConfig config_{};
  at::Tensor embedding_;
  std::vector<Layer> layers_;
  at::Tensor final_norm_;  // undefined: not all layers are loaded
};

}  // namespace ditfleet::pipeline
