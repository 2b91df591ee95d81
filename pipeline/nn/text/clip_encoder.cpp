#include "pipeline/nn/text/clip_encoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>
#include <cmath>

#include "pipeline/device/failure.h"
#include "pipeline/nn/text/token_tensor.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kMost = 1 << 24;  // beyond any sensible size, below any overflow

bool takes_nf4(std::string_view) { return true; }

}  // namespace

ClipConfig read_clip_config(const ConfigFile& file) {
  if (const auto text = file.child("text_config")) return read_clip_config(*text);
  ClipConfig c{};
  c.vocab_size = file.integer("vocab_size", 49408, 1, kMost);
  c.hidden_size = file.integer("hidden_size", 512, 1, kMost);
  c.intermediate_size = file.integer("intermediate_size", 2048, 1, kMost);
  c.num_hidden_layers = file.integer("num_hidden_layers", 12, 0, 1000);
  c.num_attention_heads = file.integer("num_attention_heads", 8, 1, kMost);
  c.max_position_embeddings = file.integer("max_position_embeddings", 77, 1, kMost);
  c.layer_norm_eps = file.number("layer_norm_eps", 1e-5);
  c.eos_token_id = file.integer("eos_token_id", 49407, 0, kMost);
  if (c.hidden_size % c.num_attention_heads != 0)
    file.refuse("hidden_size is " + std::to_string(c.hidden_size) + ", which num_attention_heads (" +
                std::to_string(c.num_attention_heads) + ") must divide");
  c.activation = read_activation(file, "hidden_act", "quick_gelu");
  return c;
}

ClipEncoder ClipEncoder::load(const ComponentFiles& from, Placement placement,
                              std::shared_ptr<region::RegionHost> regions, const std::string& quantize) {
  ClipEncoder m;
  m.config_ = read_clip_config(ConfigFile(from.dir + "/config.json"));
  m.placement_ = placement;
  auto p = Parameters::open(from, Library::kTransformers, placement);
  p.set_regions(std::move(regions));
  if (!quantize.empty()) p.quantize_on_load(quantize, takes_nf4);
  // transformers 4 saved the names below "text_model."; 5 saves them bare.
  const std::string at = p.contains("text_model.embeddings.token_embedding.weight") ? "text_model." : "";
  const std::int64_t d = m.config_.hidden_size, inner = m.config_.intermediate_size;
  m.token_embedding_ = p.tensor(at + "embeddings.token_embedding.weight", {m.config_.vocab_size, d});
  m.position_embedding_ = p.tensor(at + "embeddings.position_embedding.weight", {m.config_.max_position_embeddings, d});
  for (std::int64_t i = 0; i < m.config_.num_hidden_layers; ++i) {
    const std::string in = at + "encoder.layers." + std::to_string(i) + ".";
    Layer l;
    l.norm1 = p.norm(in + "layer_norm1", d);
    l.norm2 = p.norm(in + "layer_norm2", d);
    l.q = p.linear(in + "self_attn.q_proj", d, d);
    l.k = p.linear(in + "self_attn.k_proj", d, d);
    l.v = p.linear(in + "self_attn.v_proj", d, d);
    l.out = p.linear(in + "self_attn.out_proj", d, d);
    l.fc1 = p.linear(in + "mlp.fc1", d, inner);
    l.fc2 = p.linear(in + "mlp.fc2", inner, d);
    m.layers_.push_back(std::move(l));
  }
  m.final_norm_ = p.norm(at + "final_layer_norm", d);
  std::vector<const LinearSlot*> linears;
  std::vector<at::Tensor> tensors{m.token_embedding_, m.position_embedding_, m.final_norm_.weight, m.final_norm_.bias};
  for (const Layer& l : m.layers_) {
    linears.insert(linears.end(), {&l.q, &l.k, &l.v, &l.out, &l.fc1, &l.fc2});
    tensors.insert(tensors.end(), {l.norm1.weight, l.norm1.bias, l.norm2.weight, l.norm2.bias});
  }
  m.parts_ = std::make_shared<PartSequence>(placement, "clip", /*repeats=*/false);
  add_part(*m.parts_, linears, tensors);
  p.finish(at + "encoder.");
  m.bytes_ = p.bytes();
  m.linears_ = p.linears();
  return m;
}

std::vector<NamedLinear> ClipEncoder::named_linears() {
  std::vector<NamedLinear> all;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const std::string at = "encoder.layers." + std::to_string(i) + ".";
    Layer& l = layers_[i];
    const std::pair<const char*, LinearSlot*> named[] = {{"self_attn.q_proj", &l.q}, {"self_attn.k_proj", &l.k},
                                                         {"self_attn.v_proj", &l.v}, {"self_attn.out_proj", &l.out},
                                                         {"mlp.fc1", &l.fc1},        {"mlp.fc2", &l.fc2}};
    for (const auto& [name, slot] : named) add_named(all, *slot, at + name);
  }
  return all;
}

at::Tensor ClipEncoder::layer(const at::Tensor& hidden, const Layer& s) const {
  const std::int64_t length = hidden.size(1), d = config_.hidden_size, heads = config_.num_attention_heads;
  const auto split = [&](const at::Tensor& x) { return x.view({1, length, heads, d / heads}).transpose(1, 2); };
  const auto norm = [&](const at::Tensor& x, const NormSlot& n) {
    return at::layer_norm(x, {d}, n.weight, n.bias, config_.layer_norm_eps);
  };
  const at::Tensor x = norm(hidden, s.norm1);
  const at::Tensor attended =
      at::scaled_dot_product_attention(split(apply_linear(s.q, x)), split(apply_linear(s.k, x)),
                                       split(apply_linear(s.v, x)), /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                       /*is_causal=*/true, 1.0 / std::sqrt(static_cast<double>(d / heads)));
  const at::Tensor after = hidden + apply_linear(s.out, attended.transpose(1, 2).reshape({1, length, d}));
  return after + apply_linear(s.fc2, config_.activation(apply_linear(s.fc1, norm(after, s.norm2))));
}

at::Tensor ClipEncoder::pooled(const std::vector<std::int32_t>& ids) const {
  const auto length = static_cast<std::int64_t>(ids.size());
  if (length < 1 || length > config_.max_position_embeddings)
    fail(Code::kDataCorrupt, "[clip] the tokenizer gives " + std::to_string(length) +
                                 " ids, but the text encoder has " + std::to_string(config_.max_position_embeddings) +
                                 " positions; check model_max_length in tokenizer_config.json");
  PartSequence::Pass pass(parts_.get());
  pass.begin(0);
  at::Tensor hidden =
      at::embedding(token_embedding_, token_tensor(ids, config_.vocab_size, placement_.device, "clip")) +
      position_embedding_.slice(0, 0, length);
  for (const Layer& one : layers_) hidden = layer(hidden, one);
  hidden = at::layer_norm(hidden, {config_.hidden_size}, final_norm_.weight, final_norm_.bias, config_.layer_norm_eps);
  pass.end(0);
  auto end = std::find(ids.begin(), ids.end(), static_cast<std::int32_t>(config_.eos_token_id));
  if (config_.eos_token_id == 2) end = std::max_element(ids.begin(), ids.end());
  if (end == ids.end()) end = ids.begin();  // as argmax over no match does
  return hidden.select(1, end - ids.begin()).contiguous();
}

}  // namespace ditfleet::pipeline
