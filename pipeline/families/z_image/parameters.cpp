#include "pipeline/families/z_image/parameters.h"

#include <array>

#include "pipeline/engine/family.h"
#include "pipeline/families/z_image/adapter_names.h"

namespace ditfleet::pipeline {
namespace {

using region::Builder;
using region::Dim;
using Ref = Builder::Ref;

constexpr std::int64_t kSinusoids = 256, kTimeInner = 1024;  // TimestepEmbedder
constexpr double kHeadEps = 1e-5;                            // of q's and k's norms, whatever norm_eps says
constexpr std::array<const char*, 4> kRows{"attention_scale", "attention_gate", "mlp_scale", "mlp_gate"};
constexpr std::array<const char*, 4> kNorms{"attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"};

// A block: x + gate · norm2(attention(norm1(x) · scale)), then the same with the MLP. Without `modulated`, scale and
// gate are 1. D = width.
//   symbols      batch, tokens
//   activations  tokens [batch, tokens, D]
//   tables       rope f32 [tokens, head_dim]; those of kRows [batch, 1, D], where scale is 1 + the model's scale, and
//                gate the tangent of the model's gate
Result<region::Program> block(const ZImageConfig& c, bool modulated, region::ElementType type, bool adapters,
                              const std::vector<BlockSpec::Weight>& weights) {
  Builder b(region::program_name(modulated ? "z_image.block" : "z_image.plain_block", weights, adapters), type);
  const std::int64_t d = c.width, mlp = c.mlp_width(), head = c.head_dim();
  const Dim batch = Dim::symbol("batch"), tokens = Dim::symbol("tokens");
  Ref x = b.activation("tokens", {batch, tokens, d});
  const Ref rope =
      b.reshape("rope.rows", b.table("rope", region::ElementType::kF32, {tokens, head}), {1, tokens, 1, head});
  std::array<Ref, 4> rows, norms;
  for (std::size_t i = 0; modulated && i < rows.size(); ++i) rows[i] = b.table(kRows[i], type, {batch, 1, d});
  for (std::size_t i = 0; i < norms.size(); ++i) norms[i] = b.parameter(kNorms[i], {d});
  const Ref norm_q = b.parameter("norm_q", {head}), norm_k = b.parameter("norm_k", {head});
  const auto slots = [&](const char* name, std::size_t i, std::int64_t in, std::int64_t out) {
    const auto weight = weights.empty() ? BlockSpec::Weight::kOwn : weights.at(i);
    return adapters ? b.adapted_slots(name, batch, in, out, weight) : b.linear_slots(name, in, out, weight);
  };
  const auto qkv_slots = slots("qkv", 0, d, 3 * d), out = slots("out", 1, d, d),
             mlp_in = slots("mlp_in", 2, d, 2 * mlp), mlp_out = slots("mlp_out", 3, mlp, d);

  // diffusers rounds before it multiplies by the weight.
  const auto norm = [&](const std::string& name, Ref of, Ref weight, double eps) {
    return b.mul(name, b.rms_norm(name + ".norm", of, {}, eps), weight);
  };
  const auto scaled_norm = [&](const std::string& name, std::size_t weight, std::size_t scale) {
    const Ref normed = norm(name + ".normed", x, norms[weight], c.norm_eps);
    return modulated ? b.mul(name, normed, rows[scale]) : normed;
  };
  const auto residual = [&](const std::string& name, Ref branch, std::size_t weight, std::size_t gate) {
    const Ref normed = norm(name + ".branch", branch, norms[weight], c.norm_eps);
    return modulated ? b.gate_residual(name, x, rows[gate], normed) : b.add(name, x, normed);
  };
  const Ref qkv = b.adapted_linear("qkv_out", scaled_norm("attention_in", 0, 0), qkv_slots);
  const auto heads = [&](const char* name, int part) {
    return b.reshape(name, b.slice(std::string(name) + ".flat", qkv, 2, part * d, d), {batch, tokens, c.heads, head});
  };
  const Ref q = b.rope("q", norm("q.normed", heads("q.in", 0), norm_q, kHeadEps), rope),
            k = b.rope("k", norm("k.normed", heads("k.in", 1), norm_k, kHeadEps), rope);
  // Room for the products with the adapters' A, so that all ranks share the library's plan.
  const std::int64_t stride = out.adapter.value >= 0 && out.up.value < 0 ? d + region::kMostAdapterColumns + 64 : 0;
  const Ref attended = b.reshape(
      "attended.flat", b.attention("attended", q, k, heads("v", 2), {.token_stride = stride, .across_ranks = true}),
      {batch, tokens, d});
  x = residual("after_attention", b.adapted_linear("attention_out", attended, out), 1, 1);
  const Ref inner = b.swiglu("mlp_hidden", b.adapted_linear("mlp_in_out", scaled_norm("mlp_modulated", 2, 2), mlp_in));
  return b.finish({residual("after_mlp", b.adapted_linear("mlp_out_out", inner, mlp_out), 3, 3)});
}

// For a file in the names of the original code: where each parameter is. Empty for a file in diffusers' names.
FileNames file_names(const ZImageConfig& c, const Parameters& p) {
  if (!p.contains("x_embedder.weight")) return {};
  FileNames names = names_in_file(z_image_spec(c), z_image_aliases);
  for (const auto& [kind, count] :
       {std::pair("context_refiner.", c.refiner_layers), {"noise_refiner.", c.refiner_layers}, {"layers.", c.layers}})
    for (std::int64_t i = 0; i < count; ++i) {
      const std::string at = kind + std::to_string(i) + ".attention.";
      names[at + "norm_q.weight"] = {{at + "q_norm.weight"}};
      names[at + "norm_k.weight"] = {{at + "k_norm.weight"}};
    }
  return names;
}

BlockSpec blocks_of(const ZImageConfig& c, const std::string& name, std::int64_t count, bool modulated) {
  const std::int64_t d = c.width, mlp = c.mlp_width();
  const auto linear = [](std::vector<std::string> names, std::int64_t in, std::int64_t out, const char* input) {
    return LinearSpec{.names = std::move(names), .in = in, .out = out, .input = input, .bias = false};
  };
  BlockSpec spec{.prefix = name + ".",
                 .count = count,
                 .linears = {linear({"attention.to_q", "attention.to_k", "attention.to_v"}, d, d, "qkv"),
                             linear({"attention.to_out.0"}, d, d, "out"),
                             linear({"feed_forward.w1", "feed_forward.w3"}, d, mlp, "mlp_in"),
                             linear({"feed_forward.w2"}, mlp, d, "mlp_out")},
                 .tensors = {{"attention.norm_q.weight", {c.head_dim()}, {}, "norm_q"},
                             {"attention.norm_k.weight", {c.head_dim()}, {}, "norm_k"}},
                 .given = {"tokens", "rope"},
                 .apart = !modulated,
                 .program = [c, modulated](region::ElementType type, bool adapters, const auto& weights) {
                   return block(c, modulated, type, adapters, weights);
                 }};
  for (const char* norm : kNorms) spec.tensors.push_back({std::string(norm) + ".weight", {d}, {}, norm});
  if (!modulated) return spec;
  spec.linears.push_back({{"adaLN_modulation.0"}, c.time_width(), 4 * d});
  spec.given.insert(spec.given.end(), kRows.begin(), kRows.end());
  return spec;
}

}  // namespace

TransformerSpec z_image_spec(const ZImageConfig& c) {
  const std::int64_t d = c.width;
  return {.family = "z_image",
          .linears = {{{"all_x_embedder.2-1"}, 4 * c.channels, d},
                      {{"cap_embedder.1"}, c.text_width, d},
                      {{"t_embedder.mlp.0"}, kSinusoids, kTimeInner},
                      {{"t_embedder.mlp.2"}, kTimeInner, c.time_width()},
                      {{"all_final_layer.2-1.adaLN_modulation.1"}, c.time_width(), d},
                      {{"all_final_layer.2-1.linear"}, d, 4 * c.channels}},  // in the order (2, 2, channels)
          .tensors = {{"cap_embedder.0.weight", {c.text_width}}, {"x_pad_token", {1, d}}, {"cap_pad_token", {1, d}}},
          .blocks = {blocks_of(c, "context_refiner", c.refiner_layers, false),
                     blocks_of(c, "noise_refiner", c.refiner_layers, true), blocks_of(c, "layers", c.layers, true)},
          .file_names = [c](const Parameters& p) { return file_names(c, p); }};
}

}  // namespace ditfleet::pipeline
