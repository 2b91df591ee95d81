#include "pipeline/nn/text/qwen3_encoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/sin.h>

#include <algorithm>
#include <cmath>

#include "pipeline/device/failure.h"
#include "pipeline/nn/text/token_tensor.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kMost = 1 << 24;

// Rounds to the model's type before the weight, so the weight is no argument of LibTorch's norm.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return weight * at::rms_norm(x, {x.size(-1)}, /*weight=*/{}, eps);
}

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

}  // namespace

Qwen3Config read_qwen3_config(const ConfigFile& file) {
  if (const std::string type = file.text("model_type", "qwen3"); type != "qwen3")
    file.refuse("model_type is \"" + type + "\"; it must be \"qwen3\": the text encoder of this model is Qwen3");
  Qwen3Config c{};
  c.vocab_size = file.integer("vocab_size", 151936, 1, kMost);
  c.hidden_size = file.integer("hidden_size", 4096, 1, kMost);
  c.intermediate_size = file.integer("intermediate_size", 22016, 1, kMost);
  c.num_hidden_layers = file.integer("num_hidden_layers", 32, 1, 1000);
  c.num_attention_heads = file.integer("num_attention_heads", 32, 1, kMost);
  // null: as many as of q.
  c.num_key_value_heads = file.integer(
      "num_key_value_heads", file.fields().contains("num_key_value_heads") ? c.num_attention_heads : 32, 1, kMost);
  c.head_dim = file.integer("head_dim", 128, 2, kMost);
  c.rms_norm_eps = file.number("rms_norm_eps", 1e-6);
  if (c.num_attention_heads % c.num_key_value_heads != 0)
    file.refuse("num_attention_heads is " + std::to_string(c.num_attention_heads) + ", which num_key_value_heads (" +
                std::to_string(c.num_key_value_heads) + ") must divide");
  if (c.head_dim % 2 != 0) file.refuse("head_dim is " + std::to_string(c.head_dim) + "; it must be even");
  for (const char* field : {"attention_bias", "use_sliding_window"})
    if (file.boolean(field, false)) file.refuse(std::string(field) + " is true, which is not supported");
  for (const std::string& type : file.texts("layer_types", {}))
    if (type != "full_attention")
      file.refuse("layer_types has \"" + type + "\", which is not supported; all must be \"full_attention\"");
  const std::string name = file.text("hidden_act", "silu");
  c.activation = find_activation(name);
  if (!c.activation) file.refuse("hidden_act is \"" + name + "\"; it must be one of " + known_activations());
  // transformers reads either object and prefers what it says.
  auto rope = file.child("rope_scaling");
  if (!rope) rope = file.child("rope_parameters");
  const std::string type = rope ? rope->text("rope_type", rope->text("type", "default")) : "default";
  if (type != "default") file.refuse("rope_type is \"" + type + "\", which is not supported; it must be \"default\"");
  c.rope_theta = file.number("rope_theta", 10000);
  if (rope) c.rope_theta = rope->number("rope_theta", c.rope_theta);
  return c;
}

Qwen3Encoder Qwen3Encoder::load(const ComponentFiles& from, Placement placement, std::int64_t layers,
                                std::shared_ptr<region::RegionHost> regions, const std::string& quantize) {
  Qwen3Encoder m;
  const ConfigFile file(from.dir + "/config.json");
  const Qwen3Config& c = m.config_ = read_qwen3_config(file);
  if (c.num_hidden_layers < layers)
    file.refuse("num_hidden_layers is " + std::to_string(c.num_hidden_layers) +
                "; this model uses the output of layer " + std::to_string(layers));
  m.placement_ = placement;
  auto p = Parameters::open(from, Library::kTransformers, placement);
  if (p.contains("token_embd.weight")) p.set_file_names(gguf_names(layers));
  p.set_regions(std::move(regions));
  if (!quantize.empty()) p.quantize_on_load(quantize, takes_nf4);
  // Qwen3ForCausalLM saves the names below "model.", Qwen3Model bare.
  const std::string at = p.contains("model.embed_tokens.weight") ? "model." : "";
  const std::int64_t d = c.hidden_size, q = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
  m.embedding_ = p.tensor(at + "embed_tokens.weight", {c.vocab_size, d});
  m.parts_ = std::make_shared<PartSequence>(placement, "qwen3", /*repeats=*/false);
  add_part(*m.parts_, {}, {m.embedding_});
  const auto of_heads = [&](const std::string& norm, std::int64_t heads) {
    return p.tensor(norm, {c.head_dim}).expand({heads, c.head_dim});
  };
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::string in = at + "layers." + std::to_string(i) + ".", attention = in + "self_attn.", mlp = in + "mlp.";
    Layer l;
    l.norm1 = p.tensor(in + "input_layernorm.weight", {d});
    l.qkv = p.stacked_linear({attention + "q_proj", attention + "k_proj", attention + "v_proj"}, d, {q, kv, kv}, false);
    l.qk_norm = at::cat({of_heads(attention + "q_norm.weight", c.num_attention_heads),
                         of_heads(attention + "k_norm.weight", c.num_key_value_heads)});
    l.o = p.linear(attention + "o_proj", q, d, false);
    l.norm2 = p.tensor(in + "post_attention_layernorm.weight", {d});
    l.gate_up = p.stacked_linear({mlp + "gate_proj", mlp + "up_proj"}, d, c.intermediate_size, false);
    l.down = p.linear(mlp + "down_proj", c.intermediate_size, d, false);
    add_part(*m.parts_, {&l.qkv, &l.o, &l.gate_up, &l.down}, {l.norm1, l.qk_norm, l.norm2});
    m.layers_.push_back(std::move(l));
  }
  if (layers == c.num_hidden_layers) m.final_norm_ = p.tensor(at + "norm.weight", {d});
  for (std::int64_t i = layers; i < c.num_hidden_layers; ++i) p.skip(at + "layers." + std::to_string(i) + ".");
  p.finish(at + "layers.");
  m.bytes_ = p.bytes();
  m.linears_ = p.linears();
  return m;
}

std::vector<NamedLinear> Qwen3Encoder::named_linears() {
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

Qwen3Encoder::Shared Qwen3Encoder::shared(std::int64_t length, const std::vector<std::int32_t>& mask) const {
  const auto on_device = at::TensorOptions(placement_.device);
  const at::Tensor exponents = at::arange(0, config_.head_dim, 2, c10::ScalarType::Float) / config_.head_dim;
  const at::Tensor angles = at::arange(length, on_device.dtype(c10::ScalarType::Float)).view({length, 1, 1}) *
                            at::reciprocal(at::pow(config_.rope_theta, exponents)).to(placement_.device);
  const at::Tensor cos = at::cos(angles).to(placement_.dtype), sin = at::sin(angles).to(placement_.dtype);
  Shared made{at::cat({cos, cos}, -1), at::cat({-sin, sin}, -1)};
  const auto is_padding = [](std::int32_t real) { return real == 0; };
  if (std::none_of(mask.begin(), mask.end(), is_padding)) return made;
  at::Tensor padding = at::empty({length}, c10::ScalarType::Bool);
  std::transform(mask.begin(), mask.end(), padding.mutable_data_ptr<bool>(), is_padding);
  // Booleans, as in transformers: LibTorch converts them for each kernel, cuDNN's without infinities.
  made.seen = at::ones({1, 1, length, length}, on_device.dtype(c10::ScalarType::Bool))
                  .tril_()
                  .masked_fill_(padding.to(placement_.device), false);
  return made;
}

at::Tensor Qwen3Encoder::layer(const at::Tensor& hidden, const Layer& s, const Shared& shared) const {
  const std::int64_t length = hidden.size(1), dim = config_.head_dim, heads = config_.num_attention_heads,
                     kv_heads = config_.num_key_value_heads, inner = config_.intermediate_size;
  at::Tensor x = rms_norm(hidden, s.norm1, config_.rms_norm_eps);
  const at::Tensor qkv = apply_linear(s.qkv, x).view({1, length, heads + 2 * kv_heads, dim});
  at::Tensor qk = rms_norm(qkv.narrow(2, 0, heads + kv_heads), s.qk_norm, config_.rms_norm_eps);
  // RoPE on halves: (a, b) → (a cos - b sin, b cos + a sin).
  qk = qk * shared.cos + at::cat({qk.narrow(-1, dim / 2, dim / 2), qk.narrow(-1, 0, dim / 2)}, -1) * shared.sin;
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
  x = apply_linear(s.gate_up, rms_norm(after, s.norm2, config_.rms_norm_eps));
  return after + apply_linear(s.down, config_.activation(x.narrow(-1, 0, inner)) * x.narrow(-1, inner, inner));
}

std::vector<at::Tensor> Qwen3Encoder::encode(const std::vector<std::int32_t>& ids,
                                             const std::vector<std::int32_t>& mask,
                                             const std::vector<std::int64_t>& after) const {
  if (!mask.empty() && mask.size() != ids.size())
    fail(Code::kInternal, "[qwen3] the mask has " + std::to_string(mask.size()) + " values for " +
                              std::to_string(ids.size()) + " tokens");
  if (std::any_of(after.begin(), after.end(), [&](std::int64_t k) { return k < 0 || k > std::ssize(layers_); }))
    fail(Code::kInternal, "[qwen3] only " + std::to_string(layers_.size()) + " layers are loaded");
  std::vector<at::Tensor> states(after.size());
  PartSequence::Pass pass(parts_.get());
  pass.begin(0);
  at::Tensor hidden = at::embedding(embedding_, token_tensor(ids, config_.vocab_size, placement_.device, "qwen3"));
  pass.end(0);
  const auto keep = [&](std::size_t layers) {
    for (std::size_t k = 0; k < after.size(); ++k)
      if (after[k] == static_cast<std::int64_t>(layers)) states[k] = hidden;
  };
  keep(0);
  const Shared all = shared(hidden.size(1), mask);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    pass.begin(i + 1);
    hidden = layer(hidden, layers_[i], all);
    pass.end(i + 1);
    if (final_norm_.defined() && i + 1 == layers_.size()) hidden = rms_norm(hidden, final_norm_, config_.rms_norm_eps);
    keep(i + 1);
  }
  return states;
}

}  // namespace ditfleet::pipeline
