#include "pipeline/families/flux/slots.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kTimestepChannels = 256;  // CombinedTimestepTextProjEmbeddings

EmbedderSlots embedder(Parameters& p, const std::string& prefix, std::int64_t in, std::int64_t width) {
  return {p.linear(prefix + ".linear_1", in, width), p.linear(prefix + ".linear_2", width, width)};
}

void name(std::vector<NamedLinear>& linears, EmbedderSlots& slots, const std::string& prefix) {
  add_named(linears, slots.first, prefix + ".linear_1");
  add_named(linears, slots.second, prefix + ".linear_2");
}

}  // namespace

FluxSlots bind_flux_slots(const FluxConfig& c, Parameters& p, std::int64_t adapter_rank) {
  const std::int64_t d = c.width(), mlp = c.mlp_width();
  const LoraColumns one{adapter_rank}, three{3 * adapter_rank}, before{adapter_rank, true};
  FluxSlots s;
  s.image_in = p.linear("x_embedder", c.in_channels, d);
  s.text_in = p.linear("context_embedder", c.joint_attention_dim, d);
  s.time = embedder(p, "time_text_embed.timestep_embedder", kTimestepChannels, d);
  if (c.guidance_embeds) s.guidance = embedder(p, "time_text_embed.guidance_embedder", kTimestepChannels, d);
  s.pooled = embedder(p, "time_text_embed.text_embedder", c.pooled_projection_dim, d);
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string at = "transformer_blocks." + std::to_string(i) + ".";
    DoubleBlockSlots b;
    b.image.modulation = p.linear(at + "norm1.linear", d, 6 * d);
    b.image.qkv = p.stacked_linear({at + "attn.to_q", at + "attn.to_k", at + "attn.to_v"}, d, d, true, three);
    b.image.norm_q = p.tensor(at + "attn.norm_q.weight", {c.head_dim});
    b.image.norm_k = p.tensor(at + "attn.norm_k.weight", {c.head_dim});
    b.image.out = p.linear(at + "attn.to_out.0", d, d, true, one);
    b.image.mlp_in = p.linear(at + "ff.net.0.proj", d, mlp, true, one);
    b.image.mlp_out = p.linear(at + "ff.net.2", mlp, d, true, one);
    b.text.modulation = p.linear(at + "norm1_context.linear", d, 6 * d);
    b.text.qkv =
        p.stacked_linear({at + "attn.add_q_proj", at + "attn.add_k_proj", at + "attn.add_v_proj"}, d, d, true, three);
    b.text.norm_q = p.tensor(at + "attn.norm_added_q.weight", {c.head_dim});
    b.text.norm_k = p.tensor(at + "attn.norm_added_k.weight", {c.head_dim});
    b.text.out = p.linear(at + "attn.to_add_out", d, d, true, one);
    b.text.mlp_in = p.linear(at + "ff_context.net.0.proj", d, mlp, true, one);
    b.text.mlp_out = p.linear(at + "ff_context.net.2", mlp, d, true, one);
    s.double_blocks.push_back(std::move(b));
  }
  for (std::int64_t i = 0; i < c.num_single_layers; ++i) {
    const std::string at = "single_transformer_blocks." + std::to_string(i) + ".";
    SingleBlockSlots b;
    b.modulation = p.linear(at + "norm.linear", d, 3 * d);
    b.qkv = p.stacked_linear({at + "attn.to_q", at + "attn.to_k", at + "attn.to_v"}, d, d, true, three);
    b.norm_q = p.tensor(at + "attn.norm_q.weight", {c.head_dim});
    b.norm_k = p.tensor(at + "attn.norm_k.weight", {c.head_dim});
    b.mlp_in = p.linear(at + "proj_mlp", d, mlp, true, before);
    b.out = p.linear(at + "proj_out", d + mlp, d, true, one);
    s.single_blocks.push_back(std::move(b));
  }
  s.final_modulation = p.linear("norm_out.linear", d, 2 * d);
  s.image_out = p.linear("proj_out", d, c.token_out);
  return s;
}

std::vector<NamedLinear> named_linears(FluxSlots& s) {
  std::vector<NamedLinear> all;
  add_named(all, s.image_in, "x_embedder");
  add_named(all, s.text_in, "context_embedder");
  name(all, s.time, "time_text_embed.timestep_embedder");
  name(all, s.guidance, "time_text_embed.guidance_embedder");
  name(all, s.pooled, "time_text_embed.text_embedder");
  for (std::size_t i = 0; i < s.double_blocks.size(); ++i) {
    const std::string at = "transformer_blocks." + std::to_string(i) + ".";
    StreamSlots &image = s.double_blocks[i].image, &text = s.double_blocks[i].text;
    add_named(all, image.modulation, at + "norm1.linear");
    add_stacked(all, image.qkv, {at + "attn.to_q", at + "attn.to_k", at + "attn.to_v"});
    add_named(all, image.out, at + "attn.to_out.0");
    add_named(all, image.mlp_in, at + "ff.net.0.proj");
    add_named(all, image.mlp_out, at + "ff.net.2");
    add_named(all, text.modulation, at + "norm1_context.linear");
    add_stacked(all, text.qkv, {at + "attn.add_q_proj", at + "attn.add_k_proj", at + "attn.add_v_proj"});
    add_named(all, text.out, at + "attn.to_add_out");
    add_named(all, text.mlp_in, at + "ff_context.net.0.proj");
    add_named(all, text.mlp_out, at + "ff_context.net.2");
  }
  for (std::size_t i = 0; i < s.single_blocks.size(); ++i) {
    const std::string at = "single_transformer_blocks." + std::to_string(i) + ".";
    SingleBlockSlots& b = s.single_blocks[i];
    add_named(all, b.modulation, at + "norm.linear");
    add_stacked(all, b.qkv, {at + "attn.to_q", at + "attn.to_k", at + "attn.to_v"});
    add_named(all, b.mlp_in, at + "proj_mlp");
    add_named(all, b.out, at + "proj_out");
  }
  add_named(all, s.final_modulation, "norm_out.linear");
  add_named(all, s.image_out, "proj_out");
  return all;
}

}  // namespace ditfleet::pipeline
