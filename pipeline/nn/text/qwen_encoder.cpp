#include "pipeline/nn/text/qwen_encoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "pipeline/device/failure.h"
#include "pipeline/nn/text/token_tensor.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kMost = 1 << 24;

bool takes_nf4(std::string_view) { return true; }

// For a GGUF file: where each parameter is. Source of the names: llama.cpp's gguf-py, tensor_mapping.py.
FileNames gguf_names(std::int64_t layers) {
  FileNames names;
  names["embed_tokens.weight"] = {{"token_embd.weight"}};
  names["norm.weight"] = {{"output_norm.weight"}};
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::string in = "layers." + std::to_string(i) + ".", at = "blk." + std::to_string(i) + ".";
    names[in + "input_layernorm.weight"] = {{at + "attn_norm.weight"}};
    names[in + "post_attention_layernorm.weight"] = {{at + "ffn_norm.weight"}};
    for (const std::string one : {"q", "k"})
      names[in + "self_attn." + one + "_norm.weight"] = {{at + "attn_" + one + "_norm.weight"}};
    for (const std::string one : {"q", "k", "v"}) names[in + "self_attn." + one + "_proj"] = {{at + "attn_" + one}};
    names[in + "self_attn.o_proj"] = {{at + "attn_output"}};
    for (const std::string one : {"gate", "up", "down"}) names[in + "mlp." + one + "_proj"] = {{at + "ffn_" + one}};
  }
  return names;
}

// transformers reads either object and prefers what it says.
std::optional<ConfigFile> rope_object(const ConfigFile& file) {
  auto rope = file.child("rope_scaling");
  return rope ? rope : file.child("rope_parameters");
}

// What both models have. `c`: the defaults.
QwenConfig read_decoder(const ConfigFile& file, QwenConfig c) {
  c.vocab_size = file.integer("vocab_size", c.vocab_size, 1, kMost);
  c.hidden_size = file.integer("hidden_size", c.hidden_size, 1, kMost);
  c.intermediate_size = file.integer("intermediate_size", c.intermediate_size, 1, kMost);
  c.num_hidden_layers = file.integer("num_hidden_layers", c.num_hidden_layers, 1, 1000);
  c.num_attention_heads = file.integer("num_attention_heads", c.num_attention_heads, 1, kMost);
  // null: as many as of q.
  if (file.fields().contains("num_key_value_heads")) c.num_key_value_heads = c.num_attention_heads;
  c.num_key_value_heads = file.integer("num_key_value_heads", c.num_key_value_heads, 1, kMost);
  c.rms_norm_eps = file.number("rms_norm_eps", c.rms_norm_eps);
  if (c.num_attention_heads % c.num_key_value_heads != 0)
    file.refuse("num_attention_heads is " + std::to_string(c.num_attention_heads) + ", which num_key_value_heads (" +
                std::to_string(c.num_key_value_heads) + ") must divide");
  if (file.boolean("use_sliding_window", false)) file.refuse("use_sliding_window is true, which is not supported");
  for (const std::string& type : file.texts("layer_types", {}))
    if (type != "full_attention")
      file.refuse("layer_types has \"" + type + "\", which is not supported; all must be \"full_attention\"");
  c.activation = read_activation(file, "hidden_act", "silu");
  const auto rope = rope_object(file);
  const std::string type = rope ? rope->text("rope_type", rope->text("type", "default")) : "default";
  // "mrope": Qwen2.5-VL's three axes.
  if (type != "default" && type != "mrope")
    file.refuse("rope_type is \"" + type + "\", which is not supported; it must be \"default\"");
  c.rope_theta = file.number("rope_theta", c.rope_theta);
  if (rope) c.rope_theta = rope->number("rope_theta", c.rope_theta);
  return c;
}

}  // namespace

QwenConfig read_qwen3_config(const ConfigFile& file) {
  if (const std::string type = file.text("model_type", "qwen3"); type != "qwen3")
    file.refuse("model_type is \"" + type + "\"; it must be \"qwen3\": the text encoder of this model is Qwen3");
  QwenConfig c = read_decoder(file, {.vocab_size = 151936,
                                     .hidden_size = 4096,
                                     .intermediate_size = 22016,
                                     .num_hidden_layers = 32,
                                     .num_attention_heads = 32,
                                     .num_key_value_heads = 32,
                                     .rms_norm_eps = 1e-6,
                                     .rope_theta = 1e4});
  c.head_dim = file.integer("head_dim", 128, 2, kMost);
  if (c.head_dim % 2 != 0) file.refuse("head_dim is " + std::to_string(c.head_dim) + "; it must be even");
  if (file.boolean("attention_bias", false)) file.refuse("attention_bias is true, which is not supported");
  return c;
}

QwenConfig read_qwen25_vl_config(const ConfigFile& file) {
  if (const std::string type = file.text("model_type", "qwen2_5_vl"); type != "qwen2_5_vl")
    file.refuse("model_type is \"" + type +
                "\"; it must be \"qwen2_5_vl\": the text encoder of this model is Qwen2.5-VL");
  const ConfigFile text = file.child("text_config").value_or(file);
  QwenConfig c = read_decoder(text, {.vocab_size = 152064,
                                     .hidden_size = 8192,
                                     .intermediate_size = 29568,
                                     .num_hidden_layers = 80,
                                     .num_attention_heads = 64,
                                     .num_key_value_heads = 8,
                                     .rms_norm_eps = 1e-5,
                                     .rope_theta = 1e6});
  c.head_dim = c.hidden_size / c.num_attention_heads;
  if (c.hidden_size % (2 * c.num_attention_heads) != 0)
    file.refuse("hidden_size is " + std::to_string(c.hidden_size) + ", which twice num_attention_heads (" +
                std::to_string(c.num_attention_heads) + ") must divide");
  c.bias = true;
  c.qk_norm = false;
  c.mrope_section = {16, 24, 24};
  if (const auto rope = rope_object(text)) c.mrope_section = rope->integers("mrope_section", c.mrope_section, 0, kMost);
  if (const auto sum = std::accumulate(c.mrope_section.begin(), c.mrope_section.end(), std::int64_t{0});
      sum != c.head_dim / 2)
    file.refuse("the sum of mrope_section is " + std::to_string(sum) + "; it must be half of a head's width, " +
                std::to_string(c.head_dim / 2));
  c.image_token = static_cast<std::int32_t>(file.integer("image_token_id", 151655, 0, kMost));
  return c;
}

QwenEncoder QwenEncoder::load(const ComponentFiles& from, Placement placement, std::int64_t layers,
                              std::shared_ptr<region::RegionHost> regions, const std::string& quantize) {
  QwenEncoder m;
  const ConfigFile file(from.dir + "/config.json");
  const QwenConfig& c = m.config_ =
      file.text("model_type", "qwen3") == "qwen3" ? read_qwen3_config(file) : read_qwen25_vl_config(file);
  if (c.num_hidden_layers < layers)
    file.refuse("num_hidden_layers is " + std::to_string(c.num_hidden_layers) +
                "; this model uses the output of layer " + std::to_string(layers));
  m.placement_ = placement;
  auto p = Parameters::open(from, Library::kTransformers, placement);
  if (p.contains("token_embd.weight")) p.set_file_names(gguf_names(layers));
  p.set_regions(std::move(regions));
  if (!quantize.empty()) p.quantize_on_load(quantize, takes_nf4);
  // Qwen3ForCausalLM saves the names below "model.", Qwen3Model bare. Some releases of transformers save those of
  // Qwen2.5-VL below "model.language_model.".
  std::string at;
  for (const std::string prefix : {"model.", "model.language_model."})
    if (p.contains(prefix + "embed_tokens.weight")) at = prefix;
  const std::int64_t d = c.hidden_size, q = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
  m.embedding_ = p.tensor(at + "embed_tokens.weight", {c.vocab_size, d});
  m.parts_ = std::make_shared<PartSequence>(placement, "qwen", /*repeats=*/false);
  add_part(*m.parts_, {}, {m.embedding_});
  const auto of_heads = [&](const std::string& norm, std::int64_t heads) {
    return p.tensor(norm, {c.head_dim}).expand({heads, c.head_dim});
  };
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::string in = at + "layers." + std::to_string(i) + ".", attention = in + "self_attn.", mlp = in + "mlp.";
    Layer l;
    l.norm1 = p.tensor(in + "input_layernorm.weight", {d});
    l.qkv =
        p.stacked_linear({attention + "q_proj", attention + "k_proj", attention + "v_proj"}, d, {q, kv, kv}, c.bias);
    if (c.qk_norm)
      l.qk_norm = at::cat({of_heads(attention + "q_norm.weight", c.num_attention_heads),
                           of_heads(attention + "k_norm.weight", c.num_key_value_heads)});
    l.o = p.linear(attention + "o_proj", q, d, false);
    l.norm2 = p.tensor(in + "post_attention_layernorm.weight", {d});
    l.gate_up = p.stacked_linear({mlp + "gate_proj", mlp + "up_proj"}, d, c.intermediate_size, false);
    l.down = p.linear(mlp + "down_proj", c.intermediate_size, d, false);
    add_part(*m.parts_, {&l.qkv, &l.o, &l.gate_up, &l.down},
             c.qk_norm ? std::vector{l.norm1, l.qk_norm, l.norm2} : std::vector{l.norm1, l.norm2});
    m.layers_.push_back(std::move(l));
  }
  if (layers == c.num_hidden_layers) m.final_norm_ = p.tensor(at + "norm.weight", {d});
  for (std::int64_t i = layers; i < c.num_hidden_layers; ++i) p.skip(at + "layers." + std::to_string(i) + ".");
  p.finish(at + "layers.");
  m.bytes_ = p.bytes();
  m.linears_ = p.linears();
  return m;
}

std::vector<NamedLinear> QwenEncoder::named_linears() {
  std::vector<NamedLinear> all;
  const std::int64_t q = config_.num_attention_heads * config_.head_dim,
                     kv = config_.num_key_value_heads * config_.head_dim;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const std::string at = "layers." + std::to_string(i) + ".";
    Layer& l = layers_[i];
    all.push_back({at + "self_attn.q_proj", &l.qkv, 0, q});
    all.push_back({at + "self_attn.k_proj", &l.qkv, q, kv});
    all.push_back({at + "self_attn.v_proj", &l.qkv, q + kv, kv});
    add_named(all, l.o, at + "self_attn.o_proj");
    add_stacked(all, l.gate_up, {at + "mlp.gate_proj", at + "mlp.up_proj"});
    add_named(all, l.down, at + "mlp.down_proj");
  }
  return all;
}

// The angles of each token, [length, head_dim / 2].
at::Tensor QwenEncoder::angles(const std::vector<std::int32_t>& ids, std::span<const PictureTokens> pictures) const {
  const at::Tensor frequencies = rope_frequencies(config_.head_dim, config_.rope_theta, placement_.device);
  if (pictures.empty())
    return at::arange(static_cast<std::int64_t>(ids.size()), frequencies.options()).unsqueeze(1) * frequencies;
  // Source: get_rope_index in transformers' modeling_qwen2_5_vl.py.
  std::array<std::vector<float>, 3> at;  // time, row and column of each token
  float next = 0;
  auto picture = pictures.begin();
  for (std::size_t i = 0; i < ids.size(); i = at[0].size()) {
    const bool text = ids[i] != config_.image_token || picture == pictures.end();
    const std::int64_t rows = text ? 1 : picture->rows, columns = text ? 1 : picture->columns;
    for (std::int64_t k = 0; k < rows * columns; ++k) {
      at[0].push_back(next);
      at[1].push_back(next + static_cast<float>(k / columns));
      at[2].push_back(next + static_cast<float>(k % columns));
    }
    next += static_cast<float>(std::max(rows, columns));
    if (!text) ++picture;
  }
  std::vector<at::Tensor> positions;  // of each frequency
  for (std::size_t i = 0; i < config_.mrope_section.size(); ++i)
    positions.push_back(at::tensor(at[i % 3]).unsqueeze(1).expand({-1, config_.mrope_section[i]}));
  return at::cat(positions, 1).to(placement_.device) * frequencies;
}

QwenEncoder::Shared QwenEncoder::shared(const at::Tensor& angles, const std::vector<std::int32_t>& mask) const {
  const std::int64_t length = angles.size(0);
  Shared made{halves_rope(angles, placement_.dtype)};
  const auto is_padding = [](std::int32_t real) { return real == 0; };
  if (std::none_of(mask.begin(), mask.end(), is_padding)) return made;
  at::Tensor padding = at::empty({length}, c10::ScalarType::Bool);
  std::transform(mask.begin(), mask.end(), padding.mutable_data_ptr<bool>(), is_padding);
  // Booleans, as in transformers: LibTorch converts them for each kernel, cuDNN's without infinities.
  made.seen = at::ones({1, 1, length, length}, angles.options().dtype(c10::ScalarType::Bool))
                  .tril_()
                  .masked_fill_(padding.to(placement_.device), false);
  return made;
}

at::Tensor QwenEncoder::layer(const at::Tensor& hidden, const Layer& s, const Shared& shared) const {
  const std::int64_t length = hidden.size(1), dim = config_.head_dim, heads = config_.num_attention_heads,
                     kv_heads = config_.num_key_value_heads, inner = config_.intermediate_size;
  at::Tensor x = qwen_norm(hidden, s.norm1, config_.rms_norm_eps);
  const at::Tensor qkv = apply_linear(s.qkv, x).view({1, length, heads + 2 * kv_heads, dim});
  at::Tensor qk = qkv.narrow(2, 0, heads + kv_heads);
  if (s.qk_norm.defined()) qk = qwen_norm(qk, s.qk_norm, config_.rms_norm_eps);
  qk = apply_rope(qk, shared.rope);
  at::Tensor k = qk.narrow(2, heads, kv_heads).transpose(1, 2),
             v = qkv.narrow(2, heads + kv_heads, kv_heads).transpose(1, 2);
  const bool causal = !shared.seen;
  // As transformers: some fused kernels take no shared heads beside a mask.
  const auto repeat = [&](const at::Tensor& x) {
    return x.unsqueeze(2).expand({1, kv_heads, heads / kv_heads, length, dim}).reshape({1, heads, length, dim});
  };
  if (!causal) k = repeat(k), v = repeat(v);
  const at::Tensor attended = at::scaled_dot_product_attention(
      qk.narrow(2, 0, heads).transpose(1, 2), k, v, shared.seen, /*dropout_p=*/0.0, causal,
      1 / std::sqrt(static_cast<double>(dim)), /*enable_gqa=*/causal && heads != kv_heads);
  const at::Tensor after = hidden + apply_linear(s.o, attended.transpose(1, 2).reshape({1, length, heads * dim}));
  x = apply_linear(s.gate_up, qwen_norm(after, s.norm2, config_.rms_norm_eps));
  return after + apply_linear(s.down, config_.activation(x.narrow(-1, 0, inner)) * x.narrow(-1, inner, inner));
}

std::vector<at::Tensor> QwenEncoder::encode(const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& mask,
                                            const std::vector<std::int64_t>& after,
                                            std::span<const PictureTokens> pictures, bool axes) const {
  if (!mask.empty() && mask.size() != ids.size())
    fail(Code::kInternal, "[qwen] the mask has " + std::to_string(mask.size()) + " values for " +
                              std::to_string(ids.size()) + " tokens");
  if (std::any_of(after.begin(), after.end(), [&](std::int64_t k) { return k < 0 || k > std::ssize(layers_); }))
    fail(Code::kInternal, "[qwen] only " + std::to_string(layers_.size()) + " layers are loaded");
  std::vector<std::int64_t> places;  // of image tokens
  std::vector<at::Tensor> tokens;
  for (const PictureTokens& picture : pictures) tokens.push_back(picture.tokens);
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (!pictures.empty() && ids[i] == config_.image_token) places.push_back(static_cast<std::int64_t>(i));
  const at::Tensor images = tokens.empty() ? at::Tensor() : at::cat(tokens);
  if (images.defined() && images.size(0) != std::ssize(places))
    fail(Code::kInternal, "[qwen] " + std::to_string(places.size()) + " image tokens for " +
                              std::to_string(images.size(0)) + " of pictures");
  std::vector<at::Tensor> states(after.size());
  PartSequence::Pass pass(parts_.get());
  pass.begin(0);
  at::Tensor hidden = at::embedding(embedding_, token_tensor(ids, config_.vocab_size, placement_.device, "qwen"));
  if (images.defined()) hidden.index_copy_(1, at::tensor(places).to(placement_.device), images.unsqueeze(0));
  pass.end(0);
  const auto keep = [&](std::size_t layers) {
    for (std::size_t k = 0; k < after.size(); ++k)
      if (after[k] == static_cast<std::int64_t>(layers)) states[k] = hidden;
  };
  keep(0);
  const Shared all = shared(angles(ids, axes ? pictures : std::span<const PictureTokens>()), mask);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    pass.begin(i + 1);
    hidden = layer(hidden, layers_[i], all);
    pass.end(i + 1);
    if (final_norm_.defined() && i + 1 == layers_.size()) hidden = qwen_norm(hidden, final_norm_, config_.rms_norm_eps);
    keep(i + 1);
  }
  return states;
}

}  // namespace ditfleet::pipeline
