#include "pipeline/region/blocks/blocks.h"
#include "pipeline/region/blocks/text_layer.h"

namespace ditfleet::region {

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
