#include "pipeline/families/flux/block_programs.h"

#include <algorithm>

namespace ditfleet::region {
namespace {

using Ref = Builder::Ref;
constexpr double kEps = 1e-6;

struct Rows {
  Ref shift, scale, gate;
};

Rows modulation_rows(Builder& b, const std::string& prefix, ElementType type, const Shape& shape) {
  return {b.table(prefix + "shift", type, shape), b.table(prefix + "scale", type, shape),
          b.table(prefix + "gate", type, shape)};
}

template <std::size_t kCount>
Builder::Weight weight_of(const std::array<const char*, kCount>& linears, const std::string& name,
                          const BlockShape& s) {
  const auto at = static_cast<std::size_t>(std::find(linears.begin(), linears.end(), name) - linears.begin());
  return s.weights.empty() ? Builder::Weight::kOwn : s.weights.at(at);
}

template <std::size_t kCount>
Builder::Linear linear_slots(Builder& b, const std::array<const char*, kCount>& linears, const std::string& name,
                             const BlockShape& s, const Dim& batch, std::int64_t in, std::int64_t out) {
  const Builder::Weight weight = weight_of(linears, name, s);
  return s.adapters ? b.adapted_slots(name, batch, in, out, weight) : b.linear_slots(name, in, out, weight);
}

struct Stream {
  std::string prefix;
  Ref x;
  Rows attention, mlp;
  Builder::Linear qkv, out, mlp_in, mlp_out;
  Ref norm_q, norm_k;
  Dim start, tokens;  // its tokens among the joint ones
};

Stream stream(Builder& b, const std::string& name, const BlockShape& s, const Dim& batch, const Dim& start,
              const Dim& tokens) {
  const std::int64_t d = s.width();
  Stream made;
  made.prefix = name + ".";
  made.x = b.activation(name, {batch, tokens, d});
  made.attention = modulation_rows(b, made.prefix + "attention_", s.type, {batch, 1, d});
  made.mlp = modulation_rows(b, made.prefix + "mlp_", s.type, {batch, 1, d});
  made.qkv = linear_slots(b, kDoubleLinears, made.prefix + "qkv", s, batch, d, 3 * d);
  made.norm_q = b.parameter(made.prefix + "norm_q", {s.head_dim});
  made.norm_k = b.parameter(made.prefix + "norm_k", {s.head_dim});
  made.out = linear_slots(b, kDoubleLinears, made.prefix + "out", s, batch, d, d);
  made.mlp_in = linear_slots(b, kDoubleLinears, made.prefix + "mlp_in", s, batch, d, s.mlp_width());
  made.mlp_out = linear_slots(b, kDoubleLinears, made.prefix + "mlp_out", s, batch, s.mlp_width(), d);
  made.start = start;
  made.tokens = tokens;
  return made;
}

Ref modulated_norm(Builder& b, const std::string& name, Ref x, const Rows& rows) {
  return b.modulate(name, b.layer_norm(name + ".norm", x, kEps), rows.scale, rows.shift);
}

// Part 0, 1, 2 of qkv [batch, tokens, 3·D], for some tokens, as heads.
Ref heads(Builder& b, const std::string& name, Ref qkv, int part, const BlockShape& s, const Dim& batch,
          const Dim& start, const Dim& tokens) {
  const Ref some = b.slice(name + ".tokens", qkv, 1, start, tokens);
  const Ref flat = b.slice(name + ".flat", some, 2, part * s.width(), s.width());
  return b.reshape(name + ".heads", flat, {batch, tokens, s.heads, s.head_dim});
}

Ref normed_and_rotated(Builder& b, const std::string& name, Ref x, Ref weight, Ref table) {
  return b.rope(name, b.rms_norm(name + ".normed", x, weight, kEps), table);
}

}  // namespace

Result<Program> flux_double_block(const BlockShape& s) {
  Builder b(program_name("flux.double", s.weights, s.adapters), s.type);
  const Dim batch = Dim::symbol("batch"), image = Dim::symbol("image"), text = Dim::symbol("text");
  const Dim tokens = text + image;
  Stream of_text = stream(b, "text", s, batch, 0, text), of_image = stream(b, "image", s, batch, text, image);
  const Ref rope =
      b.reshape("rope.rows", b.table("rope", ElementType::kF32, {tokens, s.head_dim}), {1, tokens, 1, s.head_dim});

  std::vector<Ref> projected;
  for (Stream* one : {&of_text, &of_image})
    projected.push_back(b.adapted_linear(
        one->prefix + "qkv_out", modulated_norm(b, one->prefix + "attention_in", one->x, one->attention), one->qkv));
  const Ref qkv = b.join("qkv", 1, projected);

  std::vector<Ref> queries, keys;
  for (Stream* one : {&of_text, &of_image}) {
    const Ref table = b.slice(one->prefix + "rope", rope, 1, one->start, one->tokens);
    queries.push_back(normed_and_rotated(b, one->prefix + "q",
                                         heads(b, one->prefix + "q_in", qkv, 0, s, batch, one->start, one->tokens),
                                         one->norm_q, table));
    keys.push_back(normed_and_rotated(b, one->prefix + "k",
                                      heads(b, one->prefix + "k_in", qkv, 1, s, batch, one->start, one->tokens),
                                      one->norm_k, table));
  }
  const Ref attended = b.reshape(
      "attended.flat",
      b.attention("attended", b.join("q", 1, queries), b.join("k", 1, keys), heads(b, "v", qkv, 2, s, batch, 0, tokens),
                  {.token_stride = s.attention_token_stride(), .across_ranks = true}),
      {batch, tokens, s.width()});

  for (Stream* one : {&of_text, &of_image}) {
    const std::string& p = one->prefix;
    const Ref branch =
        b.adapted_linear(p + "attention_out", b.slice(p + "attended", attended, 1, one->start, one->tokens), one->out);
    const Ref x = b.gate_residual(p + "after_attention", one->x, one->attention.gate, branch);
    const Ref inner = b.gelu_tanh(
        p + "mlp_hidden",
        b.adapted_linear(p + "mlp_in_out", modulated_norm(b, p + "mlp_modulated", x, one->mlp), one->mlp_in));
    one->x =
        b.gate_residual(p + "after_mlp", x, one->mlp.gate, b.adapted_linear(p + "mlp_out_out", inner, one->mlp_out));
  }
  return b.finish({of_image.x, of_text.x});
}

Result<Program> flux_single_block(const BlockShape& s) {
  Builder b(program_name("flux.single", s.weights, s.adapters), s.type);
  const std::int64_t d = s.width();
  const Dim batch = Dim::symbol("batch"), tokens = Dim::symbol("tokens");
  const Ref x = b.activation("tokens", {batch, tokens, d});
  const Ref rope =
      b.reshape("rope.rows", b.table("rope", ElementType::kF32, {tokens, s.head_dim}), {1, tokens, 1, s.head_dim});
  const Rows rows = modulation_rows(b, "", s.type, {batch, 1, d});
  const auto qkv_slots = linear_slots(b, kSingleLinears, "qkv", s, batch, d, 3 * d);
  const Ref norm_q = b.parameter("norm_q", {s.head_dim}), norm_k = b.parameter("norm_k", {s.head_dim});
  const auto mlp_in = linear_slots(b, kSingleLinears, "mlp_in", s, batch, d, s.mlp_width()),
             out = linear_slots(b, kSingleLinears, "out", s, batch, d + s.mlp_width(), d);

  const Ref normed = modulated_norm(b, "modulated", x, rows);
  const bool beside = s.adapters && mlp_in.up.value < 0, both_beside = beside && qkv_slots.up.value < 0;
  Ref of_mlp = normed, qkv;
  if (both_beside) {  // one copy of what both linears read, with what is theirs on either side
    const Dim left = mlp_in.rank, right = qkv_slots.rank;
    const Ref wide =
        b.join("wide", 2, {b.low_rank("mlp_in.low", normed, mlp_in), normed, b.low_rank("qkv.low", normed, qkv_slots)});
    of_mlp = b.slice("mlp_in.wide", wide, 2, 0, left + d);
    qkv = b.linear("qkv_out", b.slice("qkv.wide", wide, 2, left, right + d), qkv_slots);
  } else {
    if (beside) of_mlp = b.join("mlp_in.wide", 2, {b.low_rank("mlp_in.low", normed, mlp_in), normed});
    qkv = b.adapted_linear("qkv_out", normed, qkv_slots);
  }
  const Ref q = normed_and_rotated(b, "q", heads(b, "q_in", qkv, 0, s, batch, 0, tokens), norm_q, rope);
  const Ref k = normed_and_rotated(b, "k", heads(b, "k_in", qkv, 1, s, batch, 0, tokens), norm_k, rope);
  const Ref attended = b.reshape("attended.flat",
                                 b.attention("attended", q, k, heads(b, "v", qkv, 2, s, batch, 0, tokens),
                                             {.token_stride = s.attention_token_stride(), .across_ranks = true}),
                                 {batch, tokens, d});
  const Ref inner = b.gelu_tanh(
      "mlp_hidden", beside ? b.linear("mlp_in_out", of_mlp, mlp_in) : b.adapted_linear("mlp_in_out", normed, mlp_in));
  const Ref branch = b.adapted_linear("branch", b.join("attended_and_hidden", 2, {attended, inner}), out);
  return b.finish({b.gate_residual("after", x, rows.gate, branch)});
}

}  // namespace ditfleet::region
