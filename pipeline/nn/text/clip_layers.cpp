#include "pipeline/nn/text/clip_layers.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <utility>

namespace ditfleet::pipeline {

ClipLayersConfig read_clip_layers_config(const ConfigFile& file, const ClipLayersConfig& otherwise) {
  constexpr std::int64_t kMost = 1 << 24;  // beyond any sensible size, below any overflow
  ClipLayersConfig c{};
  c.hidden_size = file.integer("hidden_size", otherwise.hidden_size, 1, kMost);
  c.intermediate_size = file.integer("intermediate_size", otherwise.intermediate_size, 1, kMost);
  c.num_hidden_layers = file.integer("num_hidden_layers", 12, 0, 1000);
  c.num_attention_heads = file.integer("num_attention_heads", otherwise.num_attention_heads, 1, kMost);
  c.layer_norm_eps = file.number("layer_norm_eps", 1e-5);
  if (c.hidden_size % c.num_attention_heads != 0)
    file.refuse("hidden_size is " + std::to_string(c.hidden_size) + ", which num_attention_heads (" +
                std::to_string(c.num_attention_heads) + ") must divide");
  c.activation = read_activation(file, "hidden_act", "quick_gelu");
  return c;
}

ClipLayers ClipLayers::load(Parameters& p, const std::string& prefix, const ClipLayersConfig& config,
                            std::int64_t count) {
  ClipLayers m;
  m.config_ = config;
  const std::int64_t d = config.hidden_size, inner = config.intermediate_size;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::string in = prefix + std::to_string(i) + ".";
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
  return m;
}

at::Tensor ClipLayers::run(at::Tensor hidden, bool causal) const {
  const std::int64_t n = hidden.size(0), length = hidden.size(1), d = config_.hidden_size,
                     heads = config_.num_attention_heads;
  const auto split = [&](const at::Tensor& x) { return x.view({n, length, heads, d / heads}).transpose(1, 2); };
  const auto norm = [&](const at::Tensor& x, const NormSlot& of) {
    return at::layer_norm(x, {d}, of.weight, of.bias, config_.layer_norm_eps);
  };
  for (const Layer& s : layers_) {
    const at::Tensor x = norm(hidden, s.norm1);
    const at::Tensor attended = at::scaled_dot_product_attention(
        split(apply_linear(s.q, x)), split(apply_linear(s.k, x)), split(apply_linear(s.v, x)), /*attn_mask=*/{},
        /*dropout_p=*/0.0, causal, 1.0 / std::sqrt(static_cast<double>(d / heads)));
    const at::Tensor after = hidden + apply_linear(s.out, attended.transpose(1, 2).reshape({n, length, d}));
    hidden = after + apply_linear(s.fc2, config_.activation(apply_linear(s.fc1, norm(after, s.norm2))));
  }
  return hidden;
}

std::vector<NamedLinear> ClipLayers::named_linears() {
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

void ClipLayers::add_to(std::vector<const LinearSlot*>& linears, std::vector<at::Tensor>& tensors) const {
  for (const Layer& l : layers_) {
    linears.insert(linears.end(), {&l.q, &l.k, &l.v, &l.out, &l.fc1, &l.fc2});
    tensors.insert(tensors.end(), {l.norm1.weight, l.norm1.bias, l.norm2.weight, l.norm2.bias});
  }
}

}  // namespace ditfleet::pipeline
