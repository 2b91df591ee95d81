#include "pipeline/families/flux2/parameters.h"

#include <array>

#include "pipeline/engine/family.h"
#include "pipeline/families/flux2/adapter_names.h"

namespace ditfleet::pipeline {
namespace {

using region::Builder;
using region::Dim;
using region::ElementType;
using Ref = Builder::Ref;
using Weight = BlockSpec::Weight;

struct Rows {
  Ref shift, scale, gate;
};

// What the programs of both kinds of blocks have in common. D = width.
class Block {
 public:
  Block(const char* name, const Flux2Config& config, ElementType type, bool adapters,
        const std::vector<Weight>& weights)
      : b(region::program_name(name, weights, adapters), type),
        c(config),
        type_(type),
        adapters_(adapters),
        weights_(weights) {}

  // The next linear of the block, in the order of its BlockSpec.
  Builder::Linear linear(const std::string& name, std::int64_t in, std::int64_t out) {
    const Weight weight = weights_.empty() ? Weight::kOwn : weights_.at(next_++);
    return adapters_ ? b.adapted_slots(name, batch, in, out, weight) : b.linear_slots(name, in, out, weight);
  }
  Rows rows(const std::string& prefix) {
    const auto row = [&](const char* name) { return b.table(prefix + name, type_, {batch, 1, c.width()}); };
    return {row("shift"), row("scale"), row("gate")};
  }
  Ref rope_table(const Dim& tokens) {
    return b.reshape("rope.rows", b.table("rope", ElementType::kF32, {tokens, c.head_dim}), {1, tokens, 1, c.head_dim});
  }
  Ref modulated_norm(const std::string& name, Ref x, const Rows& rows) {
    return b.modulate(name, b.layer_norm(name + ".norm", x, c.eps), rows.scale, rows.shift);
  }
  // Part 0, 1, 2 of [q | k | v | ..], for some tokens, as heads.
  Ref heads(const std::string& name, Ref qkv, int part, const Dim& start, const Dim& tokens) {
    const Ref flat =
        b.slice(name + ".flat", b.slice(name + ".tokens", qkv, 1, start, tokens), 2, part * c.width(), c.width());
    return b.reshape(name + ".heads", flat, {batch, tokens, c.heads, c.head_dim});
  }
  Ref normed_and_rotated(const std::string& name, Ref x, Ref weight, Ref table) {
    return b.rope(name, b.rms_norm(name + ".normed", x, weight, c.eps), table);
  }
  // Adds those of reference pictures, whose place among the others makes no difference.
  void add_references(std::vector<Ref>& keys, std::vector<Ref>& values) {
    const Dim references = Dim::symbol("references");
    keys.push_back(b.activation("reference_k", {batch, references, c.heads, c.head_dim}));
    values.push_back(b.activation("reference_v", {batch, references, c.heads, c.head_dim}));
  }
  // [batch, tokens, D]. All blocks have the same stride. After each row there is room for a single block's hidden
  // activations and for the products with the adapters' A.
  Ref attention(Ref q, Ref k, Ref v, const Dim& tokens, bool across_ranks = true) {
    const std::int64_t stride = c.width() + c.mlp_width() + region::kMostAdapterColumns + 64;
    return b.reshape("attended.flat",
                     b.attention("attended", q, k, v, {.token_stride = stride, .across_ranks = across_ranks}),
                     {batch, tokens, c.width()});
  }

  Builder b;
  const Flux2Config c;
  const Dim batch = Dim::symbol("batch");

 private:
  const ElementType type_;
  const bool adapters_;
  const std::vector<Weight>& weights_;
  std::size_t next_ = 0;
};

// The double-stream block.
//   symbols      batch, image, text
//   activations  image [batch, image, D], text [batch, text, D]
//   tables       rope f32 [text + image, head_dim]: cos and sin of each pair, text first;
//                {image,text}.{attention,mlp}_{shift,scale,gate} [batch, 1, D], where scale is 1 + the model's scale
// With cached references, also their keys and values: see double_reference_block().
template <bool references = false>
Result<region::Program> double_block(const Flux2Config& c, ElementType type, bool adapters,
                                     const std::vector<Weight>& weights) {
  Block block(references ? "flux2.double_cached" : "flux2.double", c, type, adapters, weights);
  Builder& b = block.b;
  const Dim image = Dim::symbol("image"), text = Dim::symbol("text"), tokens = text + image;
  const std::int64_t d = c.width();
  struct Stream {
    std::string prefix;
    Dim start, tokens;  // among the joint ones
    Ref x;
    Rows attention, mlp;
    Builder::Linear qkv, out, mlp_in, mlp_out;
    Ref norm_q, norm_k;
  };
  std::array<Stream, 2> streams{{{"image.", text, image}, {"text.", 0, text}}};
  for (Stream& s : streams) {
    s.x = b.activation(s.prefix.substr(0, s.prefix.size() - 1), {block.batch, s.tokens, d});
    s.attention = block.rows(s.prefix + "attention_");
    s.mlp = block.rows(s.prefix + "mlp_");
    s.qkv = block.linear(s.prefix + "qkv", d, 3 * d);
    s.out = block.linear(s.prefix + "out", d, d);
    s.mlp_in = block.linear(s.prefix + "mlp_in", d, 2 * c.mlp_width());
    s.mlp_out = block.linear(s.prefix + "mlp_out", c.mlp_width(), d);
    s.norm_q = b.parameter(s.prefix + "norm_q", {c.head_dim});
    s.norm_k = b.parameter(s.prefix + "norm_k", {c.head_dim});
  }
  const Ref rope = block.rope_table(tokens);
  const std::array<Stream*, 2> in_order{&streams[1], &streams[0]};  // text first
  std::vector<Ref> projected, queries, keys;
  for (Stream* s : in_order)
    projected.push_back(b.adapted_linear(s->prefix + "qkv_out",
                                         block.modulated_norm(s->prefix + "attention_in", s->x, s->attention), s->qkv));
  const Ref qkv = b.join("qkv", 1, projected);
  for (Stream* s : in_order) {
    const Ref table = b.slice(s->prefix + "rope", rope, 1, s->start, s->tokens);
    queries.push_back(block.normed_and_rotated(
        s->prefix + "q", block.heads(s->prefix + "q_in", qkv, 0, s->start, s->tokens), s->norm_q, table));
    keys.push_back(block.normed_and_rotated(
        s->prefix + "k", block.heads(s->prefix + "k_in", qkv, 1, s->start, s->tokens), s->norm_k, table));
  }
  std::vector<Ref> values{block.heads("v", qkv, 2, 0, tokens)};
  if (references) block.add_references(keys, values);
  const Ref attended =
      block.attention(b.join("q", 1, queries), b.join("k", 1, keys),
                      references ? b.join("all_v", 1, values) : values[0], tokens, /*across_ranks=*/!references);
  for (Stream* s : in_order) {
    const std::string& p = s->prefix;
    const Ref branch =
        b.adapted_linear(p + "attention_out", b.slice(p + "attended", attended, 1, s->start, s->tokens), s->out);
    const Ref x = b.gate_residual(p + "after_attention", s->x, s->attention.gate, branch);
    const Ref inner =
        b.swiglu(p + "mlp_hidden",
                 b.adapted_linear(p + "mlp_in_out", block.modulated_norm(p + "mlp_modulated", x, s->mlp), s->mlp_in));
    s->x = b.gate_residual(p + "after_mlp", x, s->mlp.gate, b.adapted_linear(p + "mlp_out_out", inner, s->mlp_out));
  }
  return b.finish({streams[0].x, streams[1].x});
}

// The single-stream block: one product makes q, k, v and the MLP's two halves, and one reads attention and the MLP.
//   symbols      batch, tokens
//   activations  tokens [batch, tokens, D]
//   tables       rope f32 [tokens, head_dim]; shift, scale and gate [batch, 1, D]
enum class References { kNone, kCached, kThese };

template <References references = References::kNone>
Result<region::Program> single_block(const Flux2Config& c, ElementType type, bool adapters,
                                     const std::vector<Weight>& weights) {
  const char* const names[] = {"flux2.single", "flux2.single_cached", "flux2.single_reference"};
  Block block(names[static_cast<int>(references)], c, type, adapters, weights);
  Builder& b = block.b;
  const std::int64_t d = c.width(), mlp = c.mlp_width();
  const Dim tokens = Dim::symbol("tokens");
  const Ref x = b.activation("tokens", {block.batch, tokens, d});
  const Ref rope = block.rope_table(tokens);
  const Rows rows = block.rows("");
  const Builder::Linear in = block.linear("in", d, 3 * d + 2 * mlp), out = block.linear("out", d + mlp, d);
  const Ref norm_q = b.parameter("norm_q", {c.head_dim}), norm_k = b.parameter("norm_k", {c.head_dim});
  const Ref made = b.adapted_linear("in_out", block.modulated_norm("modulated", x, rows), in);
  const auto heads = [&](const char* name, int part) { return block.heads(name, made, part, 0, tokens); };
  const Ref q = block.normed_and_rotated("q", heads("q_in", 0), norm_q, rope),
            k = block.normed_and_rotated("k", heads("k_in", 1), norm_k, rope);
  std::vector<Ref> keys{k}, values{heads("v", 2)};
  const bool cached = references == References::kCached;
  if (cached) block.add_references(keys, values);
  const Ref attended =
      cached ? block.attention(q, b.join("all_k", 1, keys), b.join("all_v", 1, values), tokens, /*across_ranks=*/false)
             : block.attention(q, k, values[0], tokens);
  const Ref inner = b.swiglu("mlp_hidden", b.slice("mlp_in", made, 2, 3 * d, 2 * mlp));
  const Ref branch = b.adapted_linear("branch", b.join("attended_and_hidden", 2, {attended, inner}), out);
  const Ref after = b.gate_residual("after", x, rows.gate, branch);
  return references == References::kThese ? b.finish({after, k, values[0]}) : b.finish({after});
}

// The same blocks for the tokens of reference pictures, which attend to themselves only. They also return their keys
// and values, [batch, tokens, heads, head_dim].
Result<region::Program> double_reference_block(const Flux2Config& c, ElementType type, bool adapters,
                                               const std::vector<Weight>& weights) {
  Block block("flux2.double_reference", c, type, adapters, weights);
  Builder& b = block.b;
  const std::int64_t d = c.width();
  const Dim tokens = Dim::symbol("image");
  const Ref x = b.activation("image", {block.batch, tokens, d});
  const Rows attention = block.rows("image.attention_"), mlp = block.rows("image.mlp_");
  const Builder::Linear qkv = block.linear("image.qkv", d, 3 * d), out = block.linear("image.out", d, d),
                        mlp_in = block.linear("image.mlp_in", d, 2 * c.mlp_width()),
                        mlp_out = block.linear("image.mlp_out", c.mlp_width(), d);
  const Ref norm_q = b.parameter("image.norm_q", {c.head_dim}), norm_k = b.parameter("image.norm_k", {c.head_dim});
  const Ref rope = block.rope_table(tokens);
  const Ref made = b.adapted_linear("qkv_out", block.modulated_norm("attention_in", x, attention), qkv);
  const Ref q = block.normed_and_rotated("q", block.heads("q_in", made, 0, 0, tokens), norm_q, rope),
            k = block.normed_and_rotated("k", block.heads("k_in", made, 1, 0, tokens), norm_k, rope),
            v = block.heads("v", made, 2, 0, tokens);
  const Ref branch = b.adapted_linear("attention_out", block.attention(q, k, v, tokens, /*across_ranks=*/false), out);
  const Ref after = b.gate_residual("after_attention", x, attention.gate, branch);
  const Ref inner =
      b.swiglu("mlp_hidden", b.adapted_linear("mlp_in_out", block.modulated_norm("mlp_modulated", after, mlp), mlp_in));
  return b.finish(
      {b.gate_residual("after_mlp", after, mlp.gate, b.adapted_linear("mlp_out_out", inner, mlp_out)), k, v});
}

// For a file in the names of BFL's original code: where each parameter is. Empty for a file in diffusers' names.
FileNames file_names(const Flux2Config& c, const Parameters& p) {
  if (!p.contains("img_in.weight")) return {};
  FileNames names = names_in_file(flux2_spec(c), flux2_aliases);
  const std::int64_t d = c.width();  // BFL's last modulation is shift, scale
  names["norm_out.linear"] = {{"final_layer.adaLN_modulation.1", d, d, 2 * d},
                              {"final_layer.adaLN_modulation.1", 0, d, 2 * d}};
  const auto norms = [&](const std::string& at, const std::string& suffix, const std::string& bfl) {
    names[at + ".norm_" + suffix + "q.weight"] = {{bfl + ".query_norm.scale"}};
    names[at + ".norm_" + suffix + "k.weight"] = {{bfl + ".key_norm.scale"}};
  };
  for (std::int64_t i = 0; i < c.double_blocks; ++i) {
    const std::string n = std::to_string(i), at = "transformer_blocks." + n + ".attn", bfl = "double_blocks." + n;
    norms(at, "", bfl + ".img_attn.norm");
    norms(at, "added_", bfl + ".txt_attn.norm");
  }
  for (std::int64_t i = 0; i < c.single_blocks; ++i)
    norms("single_transformer_blocks." + std::to_string(i) + ".attn", "",
          "single_blocks." + std::to_string(i) + ".norm");
  return names;
}

LinearSpec linear(std::vector<std::string> names, std::int64_t in, std::int64_t out, std::string input = {}) {
  return {.names = std::move(names), .in = in, .out = out, .input = std::move(input), .bias = false};
}

auto program_of(const Flux2Config& c,
                Result<region::Program> (*make)(const Flux2Config&, ElementType, bool, const std::vector<Weight>&)) {
  return [c, make](ElementType type, bool adapters, const std::vector<Weight>& weights) {
    return make(c, type, adapters, weights);
  };
}

}  // namespace

TransformerSpec flux2_spec(const Flux2Config& c) {
  const std::int64_t d = c.width(), mlp = c.mlp_width();
  TransformerSpec spec{.family = "flux2",
                       .linears = {linear({"x_embedder"}, c.channels, d), linear({"context_embedder"}, c.text_width, d),
                                   linear({"time_guidance_embed.timestep_embedder.linear_1"}, c.time_channels, d),
                                   linear({"time_guidance_embed.timestep_embedder.linear_2"}, d, d),
                                   linear({"double_stream_modulation_img.linear"}, d, 6 * d),
                                   linear({"double_stream_modulation_txt.linear"}, d, 6 * d),
                                   linear({"single_stream_modulation.linear"}, d, 3 * d),
                                   linear({"norm_out.linear"}, d, 2 * d), linear({"proj_out"}, d, c.channels)},
                       .tensors = {},
                       .blocks = {}};
  if (c.guidance_embeds) {
    spec.linears.push_back(linear({"time_guidance_embed.guidance_embedder.linear_1"}, c.time_channels, d));
    spec.linears.push_back(linear({"time_guidance_embed.guidance_embedder.linear_2"}, d, d));
  }
  std::vector<std::string> of_double = {"image", "text", "rope"};
  for (const char* rows : {"image.attention_", "image.mlp_", "text.attention_", "text.mlp_"})
    for (const char* row : {"shift", "scale", "gate"}) of_double.push_back(std::string(rows) + row);
  const std::vector<std::string> of_single = {"tokens", "rope", "shift", "scale", "gate"};
  std::vector<BlockSpec::Variant> double_variants, single_variants;
  if (c.cached_references) {
    const auto with_cached = [](std::vector<std::string> given) {
      given.insert(given.end(), {"reference_k", "reference_v"});
      return given;
    };
    std::vector<std::string> of_reference = {"image", "rope"};
    of_reference.insert(of_reference.end(), of_double.begin() + 3, of_double.begin() + 9);
    double_variants = {{with_cached(of_double), program_of(c, double_block<true>)},
                       {std::move(of_reference), program_of(c, double_reference_block), /*eager=*/true}};
    single_variants = {{with_cached(of_single), program_of(c, single_block<References::kCached>)},
                       {of_single, program_of(c, single_block<References::kThese>), /*eager=*/true}};
  }
  spec.blocks.push_back(
      {.prefix = "transformer_blocks.",
       .count = c.double_blocks,
       .linears = {linear({"attn.to_q", "attn.to_k", "attn.to_v"}, d, d, "image.qkv"),
                   linear({"attn.to_out.0"}, d, d, "image.out"), linear({"ff.linear_in"}, d, 2 * mlp, "image.mlp_in"),
                   linear({"ff.linear_out"}, mlp, d, "image.mlp_out"),
                   linear({"attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"}, d, d, "text.qkv"),
                   linear({"attn.to_add_out"}, d, d, "text.out"),
                   linear({"ff_context.linear_in"}, d, 2 * mlp, "text.mlp_in"),
                   linear({"ff_context.linear_out"}, mlp, d, "text.mlp_out")},
       .tensors = {{"attn.norm_q.weight", {c.head_dim}, {}, "image.norm_q"},
                   {"attn.norm_k.weight", {c.head_dim}, {}, "image.norm_k"},
                   {"attn.norm_added_q.weight", {c.head_dim}, {}, "text.norm_q"},
                   {"attn.norm_added_k.weight", {c.head_dim}, {}, "text.norm_k"}},
       .given = std::move(of_double),
       .program = program_of(c, double_block<>),
       .variants = std::move(double_variants)});
  spec.blocks.push_back({.prefix = "single_transformer_blocks.",
                         .count = c.single_blocks,
                         .linears = {linear({"attn.to_qkv_mlp_proj"}, d, 3 * d + 2 * mlp, "in"),
                                     linear({"attn.to_out"}, d + mlp, d, "out")},
                         .tensors = {{"attn.norm_q.weight", {c.head_dim}, {}, "norm_q"},
                                     {"attn.norm_k.weight", {c.head_dim}, {}, "norm_k"}},
                         .given = of_single,
                         .program = program_of(c, single_block<>),
                         .variants = std::move(single_variants)});
  spec.file_names = [c](const Parameters& parameters) { return file_names(c, parameters); };
  return spec;
}

}  // namespace ditfleet::pipeline
