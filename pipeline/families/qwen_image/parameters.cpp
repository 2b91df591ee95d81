#include "pipeline/families/qwen_image/parameters.h"

#include <array>

namespace ditfleet::pipeline {
namespace {

using region::Builder;
using region::Dim;
using region::ElementType;
using Ref = Builder::Ref;

constexpr std::int64_t kSinusoids = 256;
constexpr double kEps = 1e-6;

struct Rows {
  Ref shift, scale, gate;
};

// Tokens with the same modulation.
struct Stream {
  std::string name;
  Dim tokens;
  Ref x = {};
  Rows attention = {}, mlp = {};
};

// Streams with the same weights.
struct Side {
  std::string prefix;
  Dim start, tokens;  // among the joint ones
  std::vector<Stream> streams;
  Builder::Linear qkv = {}, out = {}, mlp_in = {}, mlp_out = {};
  Ref norm_q = {}, norm_k = {};
};

std::vector<std::string> stream_names(const QwenImageConfig& c) {
  return c.zero_cond_t ? std::vector<std::string>{"image", "pictures", "text"}
                       : std::vector<std::string>{"image", "text"};
}

// The double-stream block, with text first in attention. D = width.
//   symbols      batch, image, text; with zero_cond_t pictures
//   activations  image [batch, image, D], text [batch, text, D]; with zero_cond_t pictures [batch, pictures, D], which
//                have the image's weights
//   tables       rope f32 [text + image + pictures, head_dim]: cos and sin of each pair;
//                STREAM.{attention,mlp}_{shift,scale,gate} [batch, 1, D], where scale is 1 + the model's scale
Result<region::Program> block(const QwenImageConfig& c, ElementType type, bool adapters,
                              const std::vector<BlockSpec::Weight>& weights) {
  Builder b(region::program_name(c.zero_cond_t ? "qwen_image.edit_block" : "qwen_image.block", weights, adapters),
            type);
  const std::int64_t d = c.width(), mlp = c.mlp_width(), head = c.head_dim;
  const Dim batch = Dim::symbol("batch"), image = Dim::symbol("image"), text = Dim::symbol("text");
  const Dim image_side = c.zero_cond_t ? image + Dim::symbol("pictures") : image, tokens = text + image_side;
  std::array<Side, 2> sides{{{"image.", text, image_side, {{"image", image}}}, {"text.", 0, text, {{"text", text}}}}};
  if (c.zero_cond_t) sides[0].streams.push_back({"pictures", Dim::symbol("pictures")});
  std::size_t next = 0;
  const auto slots = [&](const std::string& name, std::int64_t in, std::int64_t out) {
    const auto weight = weights.empty() ? BlockSpec::Weight::kOwn : weights.at(next++);
    return adapters ? b.adapted_slots(name, batch, in, out, weight) : b.linear_slots(name, in, out, weight);
  };
  for (Side& s : sides) {
    for (Stream& one : s.streams) {
      one.x = b.activation(one.name, {batch, one.tokens, d});
      for (const auto& [rows, of] : {std::pair(&one.attention, ".attention_"), {&one.mlp, ".mlp_"}}) {
        const auto row = [&](const char* kind) { return b.table(one.name + of + kind, type, {batch, 1, d}); };
        *rows = {row("shift"), row("scale"), row("gate")};
      }
    }
    s.qkv = slots(s.prefix + "qkv", d, 3 * d);
    s.out = slots(s.prefix + "out", d, d);
    s.mlp_in = slots(s.prefix + "mlp_in", d, mlp);
    s.mlp_out = slots(s.prefix + "mlp_out", mlp, d);
    s.norm_q = b.parameter(s.prefix + "norm_q", {head});
    s.norm_k = b.parameter(s.prefix + "norm_k", {head});
  }
  const Ref rope = b.reshape("rope.rows", b.table("rope", ElementType::kF32, {tokens, head}), {1, tokens, 1, head});
  const std::array<Side*, 2> in_order{&sides[1], &sides[0]};

  const auto joined = [&](const std::string& name, const std::vector<Ref>& parts) {
    return parts.size() == 1 ? parts[0] : b.join(name, 1, parts);
  };
  // The modulated norm of all streams of a side.
  const auto modulated = [&](const Side& s, const std::string& name, Rows Stream::*rows) {
    std::vector<Ref> parts;
    for (const Stream& one : s.streams)
      parts.push_back(b.modulate(one.name + name, b.layer_norm(one.name + name + ".norm", one.x, kEps),
                                 (one.*rows).scale, (one.*rows).shift));
    return joined(s.prefix + name + ".joined", parts);
  };
  // Adds each stream's rows of a branch to it.
  const auto add_branch = [&](Side& s, const std::string& name, Ref branch, Rows Stream::*rows) {
    Dim start = 0;
    for (Stream& one : s.streams) {
      const Ref own = s.streams.size() == 1 ? branch : b.slice(one.name + name + ".own", branch, 1, start, one.tokens);
      one.x = b.gate_residual(one.name + name, one.x, (one.*rows).gate, own);
      start = start + one.tokens;
    }
  };

  std::vector<Ref> projected, queries, keys;
  for (Side* s : in_order)
    projected.push_back(
        b.adapted_linear(s->prefix + "qkv_out", modulated(*s, ".attention_in", &Stream::attention), s->qkv));
  const Ref qkv = b.join("qkv", 1, projected);
  // Part 0, 1, 2 of [q | k | v], for some tokens.
  const auto heads = [&](const std::string& name, int part, const Dim& start, const Dim& count) {
    const Ref flat = b.slice(name + ".flat", b.slice(name + ".tokens", qkv, 1, start, count), 2, part * d, d);
    return b.reshape(name + ".heads", flat, {batch, count, c.heads, head});
  };
  for (Side* s : in_order) {
    const Ref table = b.slice(s->prefix + "rope", rope, 1, s->start, s->tokens);
    const auto rotated = [&](const std::string& name, int part, Ref weight) {
      const Ref normed = b.rms_norm(name + ".norm", heads(name + "_in", part, s->start, s->tokens), {}, kEps);
      return b.rope(name, b.mul(name + ".normed", normed, weight),
                    table);  // rounded before the weight, as in diffusers
    };
    queries.push_back(rotated(s->prefix + "q", 0, s->norm_q));
    keys.push_back(rotated(s->prefix + "k", 1, s->norm_k));
  }
  // Room for the products with the adapters' A, so that all ranks share the library's plan.
  const bool columns = sides[0].out.adapter.value >= 0 && sides[0].out.up.value < 0;
  const Ref attended =
      b.reshape("attended.flat",
                b.attention("attended", b.join("q", 1, queries), b.join("k", 1, keys), heads("v", 2, 0, tokens),
                            {.token_stride = columns ? d + region::kMostAdapterColumns + 64 : 0, .across_ranks = true}),
                {batch, tokens, d});
  for (Side* s : in_order) {
    const std::string& p = s->prefix;
    const Ref own = b.slice(p + "attended", attended, 1, s->start, s->tokens);
    add_branch(*s, ".after_attention", b.adapted_linear(p + "attention_out", own, s->out), &Stream::attention);
    const Ref inner = b.gelu_tanh(
        p + "mlp_hidden", b.adapted_linear(p + "mlp_in_out", modulated(*s, ".mlp_modulated", &Stream::mlp), s->mlp_in));
    add_branch(*s, ".after_mlp", b.adapted_linear(p + "mlp_out_out", inner, s->mlp_out), &Stream::mlp);
  }
  std::vector<Ref> results;
  for (const Side& s : sides)
    for (const Stream& one : s.streams) results.push_back(one.x);
  return b.finish(results);
}

}  // namespace

TransformerSpec qwen_image_spec(const QwenImageConfig& c) {
  const std::int64_t d = c.width(), mlp = c.mlp_width();
  std::vector<std::string> given = stream_names(c);
  given.push_back("rope");
  for (const std::string& stream : stream_names(c))
    for (const char* rows : {".attention_", ".mlp_"})
      for (const char* row : {"shift", "scale", "gate"}) given.push_back(stream + rows + row);
  return {.family = "qwen_image",
          .linears = {{{"img_in"}, c.channels, d},
                      {{"txt_in"}, c.text_width, d},
                      {{"time_text_embed.timestep_embedder.linear_1"}, kSinusoids, d},
                      {{"time_text_embed.timestep_embedder.linear_2"}, d, d},
                      {{"norm_out.linear"}, d, 2 * d},
                      {{"proj_out"}, d, c.channels}},
          .tensors = {{"txt_norm.weight", {c.text_width}}},
          .blocks = {{.prefix = "transformer_blocks.",
                      .count = c.blocks,
                      .linears = {{{"attn.to_q", "attn.to_k", "attn.to_v"}, d, d, "image.qkv"},
                                  {{"attn.to_out.0"}, d, d, "image.out"},
                                  {{"img_mlp.net.0.proj"}, d, mlp, "image.mlp_in"},
                                  {{"img_mlp.net.2"}, mlp, d, "image.mlp_out"},
                                  {{"attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"}, d, d, "text.qkv"},
                                  {{"attn.to_add_out"}, d, d, "text.out"},
                                  {{"txt_mlp.net.0.proj"}, d, mlp, "text.mlp_in"},
                                  {{"txt_mlp.net.2"}, mlp, d, "text.mlp_out"},
                                  {{"img_mod.1"}, d, 6 * d},
                                  {{"txt_mod.1"}, d, 6 * d}},
                      .tensors = {{"attn.norm_q.weight", {c.head_dim}, {}, "image.norm_q"},
                                  {"attn.norm_k.weight", {c.head_dim}, {}, "image.norm_k"},
                                  {"attn.norm_added_q.weight", {c.head_dim}, {}, "text.norm_q"},
                                  {"attn.norm_added_k.weight", {c.head_dim}, {}, "text.norm_k"}},
                      .given = std::move(given),
                      .program = [c](ElementType type, bool adapters, const std::vector<BlockSpec::Weight>& weights) {
                        return block(c, type, adapters, weights);
                      }}}};
}

}  // namespace ditfleet::pipeline
