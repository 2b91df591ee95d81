#include "pipeline/nn/text/t5_encoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log.h>
#include <ATen/ops/min.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/where.h>

#include <cmath>

#include "pipeline/device/failure.h"
#include "pipeline/nn/text/token_tensor.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kMost = 1 << 24;

// T5's norm: no mean, no shift; the variance in fp32, the product rounded to the weight's type before the weight.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor variance = x.to(c10::ScalarType::Float).pow(2).mean(-1, /*keepdim=*/true);
  at::Tensor scaled = x * at::rsqrt(variance + eps);
  return weight * scaled.to(weight.scalar_type());
}

// Distance → bucket, as T5 defines it for an encoder (half the buckets for what comes after): exact for short
// distances, logarithmic in fp32 beyond.
at::Tensor relative_buckets(std::int64_t length, std::int64_t buckets, std::int64_t max_distance) {
  const at::Tensor at = at::arange(length, c10::ScalarType::Long);
  const at::Tensor relative = at.unsqueeze(0) - at.unsqueeze(1);  // key - query
  const std::int64_t half = buckets / 2, exact = half / 2;
  const at::Tensor distance = at::abs(relative);
  at::Tensor large =
      (at::log(distance.to(c10::ScalarType::Float) / static_cast<double>(exact)) /
       std::log(static_cast<double>(max_distance) / static_cast<double>(exact)) * static_cast<double>(half - exact))
          .to(c10::ScalarType::Long) +
      exact;
  large = at::minimum(large, at::full_like(large, half - 1));
  return relative.gt(0).to(c10::ScalarType::Long) * half + at::where(distance.lt(exact), distance, large);
}

// As transformers, which keeps `wo` in the model's type.
bool takes_nf4(std::string_view linear) { return !linear.ends_with(".wo"); }

}  // namespace

T5Config read_t5_config(const ConfigFile& file) {
  T5Config c{};
  if (file.boolean("is_decoder", false))
    file.refuse(
        "is_decoder is true, which is not supported: this encoder is bidirectional; "
        "set it to false");
  c.vocab_size = file.integer("vocab_size", 32128, 1, kMost);
  c.d_model = file.integer("d_model", 512, 1, kMost);
  c.d_kv = file.integer("d_kv", 64, 1, kMost);
  c.d_ff = file.integer("d_ff", 2048, 1, kMost);
  c.num_layers = file.integer("num_layers", 6, 1, 1000);
  c.num_heads = file.integer("num_heads", 8, 1, kMost);
  c.relative_attention_num_buckets = file.integer("relative_attention_num_buckets", 32, 4, kMost);
  c.relative_attention_max_distance = file.integer("relative_attention_max_distance", 128, 2, kMost);
  c.biases_of_layers = file.text("model_type", "t5") == "umt5";
  c.layer_norm_epsilon = file.number("layer_norm_epsilon", 1e-6);
  std::string projection = file.text("feed_forward_proj", "relu");
  std::string name = projection;
  if (c.gated = name.rfind("gated-", 0) == 0; c.gated) name = name.substr(6);
  if (projection == "gated-gelu") name = "gelu_new";  // what T5 1.1 means by it
  // Attributes of their own, which win where a file gives them (transformers writes both).
  c.gated = file.boolean("is_gated_act", c.gated);
  if (file.has("dense_act_fn")) name = file.text("dense_act_fn", name);
  c.activation = find_activation(name);
  if (!c.activation && file.has("dense_act_fn"))
    file.refuse("dense_act_fn is \"" + name + "\"; it must be one of " + known_activations());
  if (!c.activation)
    file.refuse("feed_forward_proj is \"" + projection + "\"; it must be NAME or gated-NAME, where NAME is one of " +
                known_activations());
  return c;
}

bool is_umt5(const Checkpoint& weights) {
  return weights.contains("encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight") ||
         weights.contains("enc.blk.1.attn_rel_b.weight");
}

namespace {

// For a GGUF file: where each parameter is. Source of the names: llama.cpp's gguf-py, tensor_mapping.py.
FileNames gguf_names(const T5Config& c) {
  FileNames names;
  names["shared.weight"] = {{"token_embd.weight"}};
  names["encoder.final_layer_norm.weight"] = {{"enc.output_norm.weight"}};
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string in = "encoder.block." + std::to_string(i) + ".layer.", at = "enc.blk." + std::to_string(i) + ".";
    names[in + "0.layer_norm.weight"] = {{at + "attn_norm.weight"}};
    names[in + "1.layer_norm.weight"] = {{at + "ffn_norm.weight"}};
    names[in + "0.SelfAttention.relative_attention_bias.weight"] = {{at + "attn_rel_b.weight"}};
    for (const char* one : {"q", "k", "v", "o"}) names[in + "0.SelfAttention." + one] = {{at + "attn_" + one}};
    names[in + "1.DenseReluDense.wo"] = {{at + "ffn_down"}};
    names[in + "1.DenseReluDense.wi_0"] = {{at + "ffn_gate"}};
    names[in + (c.gated ? "1.DenseReluDense.wi_1" : "1.DenseReluDense.wi")] = {{at + "ffn_up"}};
  }
  return names;
}

}  // namespace

T5Encoder T5Encoder::load(const ComponentFiles& from, Placement placement, std::shared_ptr<region::RegionHost> regions,
                          const std::string& quantize) {
  T5Encoder m;
  m.config_ = read_t5_config(ConfigFile(from.dir + "/config.json"));
  m.placement_ = placement;
  auto p = Parameters::open(from, Library::kTransformers, placement);
  if (p.contains("token_embd.weight")) p.set_file_names(gguf_names(m.config_));
  p.set_regions(std::move(regions));
  if (!quantize.empty()) p.quantize_on_load(quantize, takes_nf4);
  const T5Config& c = m.config_;
  const std::int64_t inner = c.num_heads * c.d_kv;
  // transformers 5 ties the two only where the file has one of them; the encoder reads its own.
  const std::string own = "encoder.embed_tokens.weight", embedding = p.contains(own) ? own : "shared.weight";
  m.embedding_ = p.tensor(embedding, {c.vocab_size, c.d_model});
  m.parts_ = std::make_shared<PartSequence>(placement, "t5", /*repeats=*/false);
  add_part(*m.parts_, {}, {m.embedding_});
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string in = "encoder.block." + std::to_string(i) + ".layer.";
    Layer l;
    l.norm1 = p.tensor(in + "0.layer_norm.weight", {c.d_model});
    l.q = p.linear(in + "0.SelfAttention.q", c.d_model, inner, false);
    l.k = p.linear(in + "0.SelfAttention.k", c.d_model, inner, false);
    l.v = p.linear(in + "0.SelfAttention.v", c.d_model, inner, false);
    l.o = p.linear(in + "0.SelfAttention.o", inner, c.d_model, false);
    if (i == 0 || c.biases_of_layers)
      l.relative_bias = p.tensor(in + "0.SelfAttention.relative_attention_bias.weight",
                                 {c.relative_attention_num_buckets, c.num_heads});
    l.norm2 = p.tensor(in + "1.layer_norm.weight", {c.d_model});
    const std::string ff = in + "1.DenseReluDense.";
    l.wi = p.linear(ff + (c.gated ? "wi_0" : "wi"), c.d_model, c.d_ff, false);
    if (c.gated) l.wi_gate = p.linear(ff + "wi_1", c.d_model, c.d_ff, false);
    l.wo = p.linear(ff + "wo", c.d_ff, c.d_model, false);
    add_part(*m.parts_, {&l.q, &l.k, &l.v, &l.o, &l.wi, &l.wi_gate, &l.wo}, {l.norm1, l.norm2});
    m.layers_.push_back(std::move(l));
  }
  m.final_norm_ = p.tensor("encoder.final_layer_norm.weight", {c.d_model});
  p.finish("encoder.");
  m.bytes_ = p.bytes();
  m.linears_ = p.linears();
  return m;
}

std::vector<NamedLinear> T5Encoder::named_linears() {
  std::vector<NamedLinear> all;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const std::string at = "encoder.block." + std::to_string(i) + ".layer.";
    Layer& l = layers_[i];
    const std::pair<const char*, LinearSlot*> named[] = {
        {"0.SelfAttention.q", &l.q},
        {"0.SelfAttention.k", &l.k},
        {"0.SelfAttention.v", &l.v},
        {"0.SelfAttention.o", &l.o},
        {config_.gated ? "1.DenseReluDense.wi_0" : "1.DenseReluDense.wi", &l.wi},
        {"1.DenseReluDense.wi_1", &l.wi_gate},
        {"1.DenseReluDense.wo", &l.wo}};
    for (const auto& [name, slot] : named) add_named(all, *slot, at + name);
  }
  return all;
}

at::Tensor T5Encoder::buckets(std::int64_t length) const {
  const std::int64_t count = config_.relative_attention_num_buckets, furthest = config_.relative_attention_max_distance;
  const at::Tensor buckets = relative_buckets(length, count, furthest);
  // On a GPU a row that is not there ends the process.
  if (at::min(buckets).item<std::int64_t>() < 0)
    fail(Code::kDataCorrupt, "[t5] relative_attention_max_distance is " + std::to_string(furthest) +
                                 ", which leaves distances up to " + std::to_string(length - 1) +
                                 " without a bucket; with " + std::to_string(count) + " buckets it must be above " +
                                 std::to_string(count / 4));
  return buckets;
}

at::Tensor T5Encoder::position_bias(const at::Tensor& table, const at::Tensor& buckets, std::int64_t length) const {
  if (table.is_meta()) return at::empty({1, config_.num_heads, length, length}, table.options());
  return at::embedding(table, buckets.to(placement_.device)).permute({2, 0, 1}).unsqueeze(0).contiguous();
}

at::Tensor T5Encoder::layer(const at::Tensor& hidden, const Layer& s, const at::Tensor& bias) const {
  const std::int64_t length = hidden.size(1), heads = config_.num_heads;
  const auto split = [&](const at::Tensor& x) { return x.view({1, length, heads, config_.d_kv}).transpose(1, 2); };
  at::Tensor x = rms_norm(hidden, s.norm1, config_.layer_norm_epsilon);
  const at::Tensor attended = at::scaled_dot_product_attention(split(apply_linear(s.q, x)), split(apply_linear(s.k, x)),
                                                               split(apply_linear(s.v, x)), bias, /*dropout_p=*/0.0,
                                                               /*is_causal=*/false, /*scale=*/1.0);
  const at::Tensor after =
      hidden + apply_linear(s.o, attended.transpose(1, 2).reshape({1, length, heads * config_.d_kv}));
  x = rms_norm(after, s.norm2, config_.layer_norm_epsilon);
  at::Tensor inner = config_.activation(apply_linear(s.wi, x));
  if (config_.gated) inner = inner * apply_linear(s.wi_gate, x);
  return after + apply_linear(s.wo, inner);
}

at::Tensor T5Encoder::encode(const std::vector<std::int32_t>& ids) const {
  PartSequence::Pass pass(parts_.get());
  pass.begin(0);
  at::Tensor hidden = at::embedding(embedding_, token_tensor(ids, config_.vocab_size, placement_.device, "t5"));
  pass.end(0);
  const auto length = static_cast<std::int64_t>(ids.size());
  const at::Tensor distances = hidden.is_meta() ? at::Tensor() : buckets(length);
  at::Tensor bias;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    pass.begin(i + 1);
    if (layers_[i].relative_bias.defined()) bias = position_bias(layers_[i].relative_bias, distances, length);
    hidden = layer(hidden, layers_[i], bias);
    pass.end(i + 1);
  }
  return rms_norm(hidden, final_norm_, config_.layer_norm_epsilon);
}

}  // namespace ditfleet::pipeline
