#include "pipeline/families/wan/block_program.h"

namespace ditfleet::region {

using Ref = Builder::Ref;

Result<Program> wan_block(const WanBlockShape& s) {
  Builder b(program_name(s.still ? "wan.still" : s.image ? "wan.image" : "wan.block", s.weights, s.adapters), s.type);
  const std::int64_t d = s.width();
  const Dim batch = Dim::symbol("batch"), text = Dim::symbol("text");
  // Tokens with the same modulation: `x` at first, the others are theirs in the sequence of all tokens.
  struct Part {
    std::string suffix;
    Ref x;
    Dim start, length;
    std::array<Ref, kWanRows.size()> rows;
  };
  std::vector<Part> parts;
  Dim tokens = 0;
  const auto add_part = [&](const char* name, const char* suffix) {
    const Dim length = Dim::symbol(name);
    parts.push_back({suffix, b.activation(name, {batch, length, d}), tokens, length, {}});
    tokens = tokens + length;
  };
  if (s.still) add_part("still", ".still");
  add_part("tokens", "");
  const Ref of_text = b.activation("text", {batch, text, d});
  const Dim image = Dim::symbol("image");
  const Ref of_image = s.image ? b.activation("image", {batch, image, d}) : Ref();
  const Ref rope =
      b.reshape("rope.rows", b.table("rope", ElementType::kF32, {tokens, s.head_dim}), {1, tokens, s.head_dim});
  const auto count = static_cast<std::int64_t>(parts.size());
  for (std::size_t i = 0; i < kWanRows.size(); ++i) {
    const Ref table = b.table(kWanRows[i], ElementType::kF32, {batch, count, d});
    for (std::int64_t p = 0; p < count; ++p) {
      Part& part = parts[static_cast<std::size_t>(p)];
      part.rows[i] = count == 1 ? table : b.slice(kWanRows[i] + (".row" + part.suffix), table, 1, p, 1);
    }
  }
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
  // What `of` makes of each part, as all tokens.
  const auto joined = [&](const std::string& name, const auto& of) {
    std::vector<Ref> made;
    for (const Part& one : parts) made.push_back(of(count == 1 ? name : name + ".of" + one.suffix, one));
    return count == 1 ? made[0] : b.join(name, 1, made);
  };
  // Makes x the result of `of`, which gets the part's rows of `branch`.
  const auto update = [&](const std::string& name, Ref branch, const auto& of) {
    for (Part& one : parts)
      one.x = of(name + one.suffix, one,
                 count == 1 ? branch : b.slice(name + ".branch" + one.suffix, branch, 1, one.start, one.length));
  };
  const auto modulated = [&](const std::string& name, std::size_t scale, std::size_t shift) {
    return joined(name, [&](const std::string& of, const Part& one) {
      return norm(of, one.x, one.rows[scale], one.rows[shift]);
    });
  };
  const auto gated = [&](const std::string& name, std::size_t gate, Ref branch) {
    update(name, branch, [&](const std::string& of, const Part& one, Ref rows) {
      return b.gate_residual(of, one.x, one.rows[gate], rows);
    });
  };
  const auto attend = [&](const std::string& name, Ref q, Ref k, Ref v, const Dim& keys, const Builder::Linear* next,
                          bool across_ranks) {
    const auto heads = [&](const char* of, Ref flat, const Dim& length) {
      return b.reshape(name + of, flat, {batch, length, s.heads, s.head_dim});
    };
    const Ref query = heads(".q", q, tokens), key = heads(".k", k, keys), value = heads(".v", v, keys);
    // Room for the products with the adapters' A, so that all ranks share the library's plan.
    const std::int64_t stride =
        next && next->adapter.value >= 0 && next->up.value < 0 ? d + kMostAdapterColumns + 64 : 0;
    return b.reshape(name + ".flat",
                     b.attention(name, query, key, value, {.token_stride = stride, .across_ranks = across_ranks}),
                     {batch, tokens, d});
  };

  const Ref qkv = b.adapted_linear("qkv_out", modulated("attention_in", 1, 0), qkv_slots);
  // The norm is over all heads together, so the table of one head repeats along the row.
  const Ref q = b.rope("q", b.rms_norm("q.normed", part("q.in", qkv, 0), norm_q, s.eps), rope);
  const Ref k = b.rope("k", b.rms_norm("k.normed", part("k.in", qkv, 1), norm_k, s.eps), rope);
  const Ref attended = attend("attended", q, k, part("v", qkv, 2), tokens, &out, true);
  gated("after_attention", 2, b.adapted_linear("attention_out", attended, out));

  Ref weight, bias;
  if (s.cross_norm) {
    weight = b.parameter("norm2.weight", ElementType::kF32, {d});
    bias = b.parameter("norm2.bias", ElementType::kF32, {d});
  }
  const Ref normed = joined("cross_in", [&](const std::string& name, const Part& one) {
    return s.cross_norm ? norm(name, one.x, weight, bias) : one.x;
  });
  const Ref kv = b.adapted_linear("cross_kv_out", of_text, cross_kv);
  const Ref cross_q_in = b.adapted_linear("cross_q_out", normed, cross_q);
  const Ref queries = b.rms_norm("cross.q", cross_q_in, cross_norm_q, s.eps);
  const Ref keys = b.rms_norm("cross.k", part("cross.k.in", kv, 0), cross_norm_k, s.eps);
  Ref crossed = attend("crossed", queries, keys, part("cross.v", kv, 1), text, s.image ? nullptr : &cross_out, false);
  if (s.image) {
    const Ref of = b.adapted_linear("image_kv_out", of_image, slots(7, d, 2 * d));
    const Ref image_keys = b.rms_norm("image.k", part("image.k.in", of, 0), b.parameter("image_norm_k", {d}), s.eps);
    crossed = b.add("crossed.both", crossed,
                    attend("image.crossed", queries, image_keys, part("image.v", of, 1), image, nullptr, false));
  }
  update("after_cross", b.adapted_linear("cross_out_out", crossed, cross_out),
         [&](const std::string& name, const Part& one, Ref rows) { return b.add(name, one.x, rows); });

  const Ref inner = b.gelu_tanh("mlp_hidden", b.adapted_linear("mlp_in_out", modulated("mlp_modulated", 4, 3), mlp_in));
  gated("after_mlp", 5, b.adapted_linear("mlp_out_out", inner, mlp_out));
  std::vector<Ref> outputs;
  for (const Part& one : parts) outputs.push_back(one.x);
  return b.finish(outputs);
}

}  // namespace ditfleet::region
