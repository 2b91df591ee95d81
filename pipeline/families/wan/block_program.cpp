#include "pipeline/families/wan/block_program.h"

namespace ditfleet::region {

using Ref = Builder::Ref;

Result<Program> wan_block(const WanBlockShape& s) {
  Builder b(program_name("wan.block", s.weights, s.adapters), s.type);
  const std::int64_t d = s.width();
  const Dim batch = Dim::symbol("batch"), tokens = Dim::symbol("tokens"), text = Dim::symbol("text");
  Ref x = b.activation("tokens", {batch, tokens, d});
  const Ref of_text = b.activation("text", {batch, text, d});
  const Ref rope =
      b.reshape("rope.rows", b.table("rope", ElementType::kF32, {tokens, s.head_dim}), {1, tokens, s.head_dim});
  std::array<Ref, kWanRows.size()> rows;
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = b.table(kWanRows[i], ElementType::kF32, {batch, 1, d});
  const auto slots = [&](std::size_t i, std::int64_t in, std::int64_t out) {
    const Builder::Weight weight = s.weights.empty() ? Builder::Weight::kOwn : s.weights.at(i);
    return s.adapters ? b.adapted_slots(kWanLinears[i], batch, in, out, weight)
                      : b.linear_slots(kWanLinears[i], in, out, weight);
  };
  const auto qkv_slots = slots(0, d, 3 * d), out = slots(1, d, d), cross_q = slots(2, d, d),
             cross_kv = slots(3, d, 2 * d), cross_out = slots(4, d, d), mlp_in = slots(5, d, s.ffn),
             mlp_out = slots(6, s.ffn, d);
  const Ref norm_q = b.parameter("norm_q", {d}), norm_k = b.parameter("norm_k", {d});
  const Ref cross_norm_q = b.parameter("cross_norm_q", {d}), cross_norm_k = b.parameter("cross_norm_k", {d});

  // A LayerNorm in f32 with a scale and a shift. Each use converts its operand itself: a shared f32 copy would be
  // written to memory.
  const auto norm = [&](const std::string& name, Ref of, Ref scale, Ref shift) {
    const Ref wide = b.layer_norm(name + ".norm", b.cast(name + ".f32", of, ElementType::kF32), s.eps);
    return b.cast(name, b.modulate(name + ".modulated", wide, scale, shift), s.type);
  };
  const auto part = [&](const std::string& name, Ref of, int i) { return b.slice(name, of, 2, i * d, d); };
  const auto attend = [&](const std::string& name, Ref q, Ref k, Ref v, const Dim& keys, const Builder::Linear& next,
                          bool across_ranks) {
    const auto heads = [&](const char* of, Ref flat, const Dim& length) {
      return b.reshape(name + of, flat, {batch, length, s.heads, s.head_dim});
    };
    const Ref query = heads(".q", q, tokens), key = heads(".k", k, keys), value = heads(".v", v, keys);
    // Room for the products with the adapters' A, so that all ranks share the library's plan.
    const std::int64_t stride = next.adapter.value >= 0 && next.up.value < 0 ? d + kMostAdapterColumns + 64 : 0;
    return b.reshape(name + ".flat",
                     b.attention(name, query, key, value, {.token_stride = stride, .across_ranks = across_ranks}),
                     {batch, tokens, d});
  };

  const Ref qkv = b.adapted_linear("qkv_out", norm("attention_in", x, rows[1], rows[0]), qkv_slots);
  // The norm is over all heads together, so the table of one head repeats along the row.
  const Ref q = b.rope("q", b.rms_norm("q.normed", part("q.in", qkv, 0), norm_q, s.eps), rope);
  const Ref k = b.rope("k", b.rms_norm("k.normed", part("k.in", qkv, 1), norm_k, s.eps), rope);
  const Ref attended = attend("attended", q, k, part("v", qkv, 2), tokens, out, true);
  x = b.gate_residual("after_attention", x, rows[2], b.adapted_linear("attention_out", attended, out));

  Ref normed = x;
  if (s.cross_norm) {
    const Ref weight = b.parameter("norm2.weight", ElementType::kF32, {d});
    const Ref bias = b.parameter("norm2.bias", ElementType::kF32, {d});
    normed = norm("cross_in", x, weight, bias);
  }
  const Ref kv = b.adapted_linear("cross_kv_out", of_text, cross_kv);
  const Ref cross_q_in = b.adapted_linear("cross_q_out", normed, cross_q);
  const Ref queries = b.rms_norm("cross.q", cross_q_in, cross_norm_q, s.eps);
  const Ref keys = b.rms_norm("cross.k", part("cross.k.in", kv, 0), cross_norm_k, s.eps);
  const Ref crossed = attend("crossed", queries, keys, part("cross.v", kv, 1), text, cross_out, false);
  x = b.add("after_cross", x, b.adapted_linear("cross_out_out", crossed, cross_out));

  const Ref inner =
      b.gelu_tanh("mlp_hidden", b.adapted_linear("mlp_in_out", norm("mlp_modulated", x, rows[4], rows[3]), mlp_in));
  return b.finish({b.gate_residual("after_mlp", x, rows[5], b.adapted_linear("mlp_out_out", inner, mlp_out))});
}

}  // namespace ditfleet::region
