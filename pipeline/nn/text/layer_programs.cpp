#include "pipeline/nn/text/layer_programs.h"

#include "pipeline/region/ir/builder.h"

namespace ditfleet::region {
namespace {

Builder::Ref activated(Builder& b, const std::string& name, OpCode activation, Builder::Ref x) {
  switch (activation) {
    case OpCode::kQuickGelu: return b.quick_gelu(name, x);
    case OpCode::kGeluErf: return b.gelu_erf(name, x);
    case OpCode::kSilu: return b.silu(name, x);
    default: return b.gelu_tanh(name, x);
  }
}

}  // namespace

Result<Program> t5_layer(const TextLayerShape& s) {
  using Ref = Builder::Ref;
  Builder b("t5.layer", s.type);
  const Dim batch = Dim::symbol("batch"), tokens = Dim::symbol("tokens");
  const std::int64_t attended_width = s.heads * s.head_dim;
  const Ref hidden = b.activation("hidden", {batch, tokens, s.width});
  const Ref bias = b.table("position_bias", s.type, {1, s.heads, tokens, tokens});
  const auto weight = [&](const std::string& name, std::int64_t in, std::int64_t out) {
    return Builder::Linear{b.parameter(name + ".weight", {out, in}), {}};
  };
  const Ref norm1 = b.parameter("norm1", {s.width}), norm2 = b.parameter("norm2", {s.width});
  const auto q = weight("q", s.width, attended_width), k = weight("k", s.width, attended_width),
             v = weight("v", s.width, attended_width), o = weight("o", attended_width, s.width),
             wi = weight("wi", s.width, s.inner);
  const auto wi_gate = s.gated ? weight("wi_gate", s.width, s.inner) : Builder::Linear{};
  const auto wo = weight("wo", s.inner, s.width);

  const Ref normed = b.rms_norm("normed", hidden, norm1, s.eps);
  const auto heads = [&](const std::string& name, const Builder::Linear& slots) {
    return b.reshape(name + ".heads", b.linear(name + "_out", normed, slots), {batch, tokens, s.heads, s.head_dim});
  };
  const Ref attended = b.attention("attended", heads("q", q), heads("k", k), heads("v", v), {.bias = bias, .scale = 1});
  const Ref branch = b.linear("o_out", b.reshape("attended.flat", attended, {batch, tokens, attended_width}), o);
  const Ref after = b.add("after_attention", hidden, branch);
  const Ref again = b.rms_norm("normed_again", after, norm2, s.eps);
  Ref inner = activated(b, "inner", s.activation, b.linear("wi_out", again, wi));
  if (s.gated) inner = b.mul("gated", inner, b.linear("wi_gate_out", again, wi_gate));
  return b.finish({b.add("after", after, b.linear("wo_out", inner, wo))});
}

Result<Program> clip_layer(const TextLayerShape& s) {
  using Ref = Builder::Ref;
  Builder b("clip.layer", s.type);
  const Dim batch = Dim::symbol("batch"), tokens = Dim::symbol("tokens");
  const Ref hidden = b.activation("hidden", {batch, tokens, s.width});
  struct Norm {
    Ref weight, bias;
  };
  const auto norm_slots = [&](const std::string& name) {
    return Norm{b.parameter(name + ".weight", {s.width}), b.parameter(name + ".bias", {s.width})};
  };
  const Norm norm1 = norm_slots("norm1"), norm2 = norm_slots("norm2");
  const auto q = b.linear_slots("q", s.width, s.width), k = b.linear_slots("k", s.width, s.width),
             v = b.linear_slots("v", s.width, s.width), out = b.linear_slots("out", s.width, s.width),
             fc1 = b.linear_slots("fc1", s.width, s.inner), fc2 = b.linear_slots("fc2", s.inner, s.width);

  const auto normed = [&](const std::string& name, Ref x, const Norm& slots) {
    return b.modulate(name, b.layer_norm(name + ".norm", x, s.eps), slots.weight, slots.bias);
  };
  const Ref x = normed("normed", hidden, norm1);
  const auto heads = [&](const std::string& name, const Builder::Linear& slots) {
    return b.reshape(name + ".heads", b.linear(name + "_out", x, slots), {batch, tokens, s.heads, s.head_dim});
  };
  const Ref attended =
      b.attention("attended", heads("q", q), heads("k", k), heads("v", v), {.bias = {}, .causal = true});
  const Ref branch = b.linear("out_out", b.reshape("attended.flat", attended, {batch, tokens, s.width}), out);
  const Ref after = b.add("after_attention", hidden, branch);
  const Ref inner = activated(b, "inner", s.activation, b.linear("fc1_out", normed("normed_again", after, norm2), fc1));
  return b.finish({b.add("after", after, b.linear("fc2_out", inner, fc2))});
}

}  // namespace ditfleet::region
