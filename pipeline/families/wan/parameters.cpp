#include "pipeline/families/wan/parameters.h"

#include "pipeline/families/wan/adapter_names.h"
#include "pipeline/families/wan/block_program.h"

namespace ditfleet::pipeline {
namespace {

// For a file in the names of Wan's own code: where each parameter is. Empty for a file in diffusers' names.
FileNames file_names(const WanConfig& c, const Parameters& p) {
  FileNames names;
  if (!p.contains("head.head.bias")) return names;
  each_linear(wan_spec(c), [&](const LinearSpec&, const std::vector<std::string>& each) {
    for (const std::string& name : each) names[name] = {{wan_own_name(name)}};
  });
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string at = "blocks." + std::to_string(i) + ".";
    names[at + "attn2.norm_added_k.weight"] = {{at + "cross_attn.norm_k_img.weight"}};
    for (const char* norm : {"norm_q.weight", "norm_k.weight"}) {
      names[at + "attn1." + norm] = {{at + "self_attn." + norm}};
      names[at + "attn2." + norm] = {{at + "cross_attn." + norm}};
    }
    for (const char* part : {"weight", "bias"}) names[at + "norm2." + part] = {{at + "norm3." + part}};
    names[at + "scale_shift_table"] = {{at + "modulation"}};
  }
  names["scale_shift_table"] = {{"head.modulation"}};
  const std::string image = "condition_embedder.image_embedder.";
  for (const std::string part : {"weight", "bias"}) {
    names[image + "norm1." + part] = {{"img_emb.proj.0." + part}};
    names[image + "norm2." + part] = {{"img_emb.proj.4." + part}};
  }
  names[image + "pos_embed"] = {{"img_emb.emb_pos"}};
  return names;
}

}  // namespace

TransformerSpec wan_spec(const WanConfig& c) {
  constexpr auto kFp32 = c10::ScalarType::Float;
  const std::int64_t d = c.width();
  BlockSpec blocks{
      .prefix = "blocks.",
      .count = c.num_layers,
      .linears = {{{"attn1.to_q", "attn1.to_k", "attn1.to_v"}, d, d},
                  {{"attn1.to_out.0"}, d, d},
                  {{"attn2.to_q"}, d, d},
                  {{"attn2.to_k", "attn2.to_v"}, d, d},
                  {{"attn2.to_out.0"}, d, d},
                  {{"ffn.net.0.proj"}, d, c.ffn_dim},
                  {{"ffn.net.2"}, c.ffn_dim, d}},
      .tensors = {{"attn1.norm_q.weight", {d}, {}, "norm_q"},
                  {"attn1.norm_k.weight", {d}, {}, "norm_k"},
                  {"attn2.norm_q.weight", {d}, {}, "cross_norm_q"},
                  {"attn2.norm_k.weight", {d}, {}, "cross_norm_k"},
                  {"scale_shift_table", {1, 6, d}, kFp32}},
      .given = {"tokens", "text", "rope"},  // before them the still tokens, after them the image
      .program = [c](region::ElementType type, bool adapters, const std::vector<BlockSpec::Weight>& weights) {
        return region::wan_block({.heads = c.heads,
                                  .head_dim = c.head_dim,
                                  .ffn = c.ffn_dim,
                                  .eps = c.eps,
                                  .cross_norm = c.cross_attn_norm,
                                  .still = c.expand_timesteps,
                                  .image = c.image_dim > 0,
                                  .type = type,
                                  .adapters = adapters,
                                  .weights = weights});
      }};
  if (c.image_dim > 0) {
    blocks.linears.push_back({{"attn2.add_k_proj", "attn2.add_v_proj"}, d, d});
    blocks.tensors.push_back({"attn2.norm_added_k.weight", {d}, {}, "image_norm_k"});
    blocks.given.emplace_back("image");
  }
  for (std::size_t i = 0; i < blocks.linears.size(); ++i) blocks.linears[i].input = region::kWanLinears[i];
  if (c.expand_timesteps) blocks.given.insert(blocks.given.begin(), "still");
  blocks.given.insert(blocks.given.end(), region::kWanRows.begin(), region::kWanRows.end());
  if (c.cross_attn_norm)
    for (const char* name : {"norm2.weight", "norm2.bias"}) blocks.tensors.push_back({name, {d}, kFp32, name});
  TransformerSpec spec{.family = "wan",
                       .linears = {{{"condition_embedder.time_embedder.linear_1"}, c.freq_dim, d, "", false, kFp32},
                                   {{"condition_embedder.time_embedder.linear_2"}, d, d, "", false, kFp32},
                                   {{"condition_embedder.time_proj"}, d, 6 * d},
                                   {{"condition_embedder.text_embedder.linear_1"}, c.text_dim, d},
                                   {{"condition_embedder.text_embedder.linear_2"}, d, d},
                                   {{"proj_out"}, d, 4 * c.out_channels}},  // in the order (1, 2, 2, C)
                       .tensors = {{"patch_embedding.weight", {d, c.in_channels, 1, 2, 2}},
                                   {"patch_embedding.bias", {d}},
                                   {"scale_shift_table", {1, 2, d}, kFp32}},
                       .blocks = {std::move(blocks)},
                       .file_names = [c](const Parameters& parameters) { return file_names(c, parameters); }};
  if (c.image_dim == 0) return spec;
  const std::string image = "condition_embedder.image_embedder.";
  spec.linears.push_back({{image + "ff.net.0.proj"}, c.image_dim, c.image_dim});
  spec.linears.push_back({{image + "ff.net.2"}, c.image_dim, d});
  for (const auto& [norm, width] : {std::pair("norm1", c.image_dim), {"norm2", d}})
    for (const char* part : {".weight", ".bias"}) spec.tensors.push_back({image + norm + part, {width}, kFp32});
  if (c.pos_embed_seq_len > 0) spec.tensors.push_back({image + "pos_embed", {1, c.pos_embed_seq_len, c.image_dim}});
  return spec;
}

}  // namespace ditfleet::pipeline
