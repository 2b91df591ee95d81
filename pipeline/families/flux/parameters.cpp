#include "pipeline/families/flux/parameters.h"

#include "pipeline/engine/family.h"
#include "pipeline/families/flux/adapter_names.h"
#include "pipeline/families/flux/block_programs.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kTimestepChannels = 256;  // CombinedTimestepTextProjEmbeddings

// For a file in the names of BFL's original code: where each parameter is. Empty for a file in diffusers' names.
FileNames file_names(const FluxConfig& c, const Parameters& p) {
  FileNames names;
  if (!p.contains("img_in.bias")) return names;
  names = names_in_file(flux_spec(c), flux_aliases);
  const auto norms = [&](const std::string& at, const std::string& suffix, const std::string& bfl) {
    names[at + ".norm_" + suffix + "q.weight"] = {{bfl + ".query_norm.scale"}};
    names[at + ".norm_" + suffix + "k.weight"] = {{bfl + ".key_norm.scale"}};
  };
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string at = "transformer_blocks." + std::to_string(i) + ".attn",
                      bfl = "double_blocks." + std::to_string(i);
    norms(at, "", bfl + ".img_attn.norm");
    norms(at, "added_", bfl + ".txt_attn.norm");
  }
  for (std::int64_t i = 0; i < c.num_single_layers; ++i)
    norms("single_transformer_blocks." + std::to_string(i) + ".attn", "",
          "single_blocks." + std::to_string(i) + ".norm");
  return names;
}

auto program_of(const FluxConfig& c, Result<region::Program> (*make)(const region::BlockShape&)) {
  return [heads = c.heads, head_dim = c.head_dim, make](region::ElementType type, bool adapters,
                                                        const std::vector<BlockSpec::Weight>& weights) {
    return make({.heads = heads, .head_dim = head_dim, .type = type, .adapters = adapters, .weights = weights});
  };
}

}  // namespace

TransformerSpec flux_spec(const FluxConfig& c) {
  const std::int64_t d = c.width(), mlp = c.mlp_width();
  TransformerSpec spec{.family = "flux", .linears = {}, .tensors = {}, .blocks = {}};
  const auto embedder = [&](const std::string& name, std::int64_t in) {
    spec.linears.push_back({{"time_text_embed." + name + ".linear_1"}, in, d});
    spec.linears.push_back({{"time_text_embed." + name + ".linear_2"}, d, d});
  };
  spec.linears = {{{"x_embedder"}, c.in_channels, d}, {{"context_embedder"}, c.joint_attention_dim, d}};
  embedder("timestep_embedder", kTimestepChannels);
  embedder("text_embedder", c.pooled_projection_dim);
  spec.linears.push_back({{"norm_out.linear"}, d, 2 * d});  // scale, shift (in this order, unlike the blocks)
  spec.linears.push_back({{"proj_out"}, d, c.token_out});
  if (c.guidance_embeds) embedder("guidance_embedder", kTimestepChannels);

  std::vector<std::string> of_double = {"image", "text", "rope"};
  for (const char* rows : {"image.attention_", "image.mlp_", "text.attention_", "text.mlp_"})
    for (const char* row : {"shift", "scale", "gate"}) of_double.push_back(std::string(rows) + row);
  spec.blocks.push_back({.prefix = "transformer_blocks.",
                         .count = c.num_layers,
                         .linears = {{{"attn.to_q", "attn.to_k", "attn.to_v"}, d, d, "image.qkv"},
                                     {{"attn.to_out.0"}, d, d, "image.out"},
                                     {{"ff.net.0.proj"}, d, mlp, "image.mlp_in"},
                                     {{"ff.net.2"}, mlp, d, "image.mlp_out"},
                                     {{"attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"}, d, d, "text.qkv"},
                                     {{"attn.to_add_out"}, d, d, "text.out"},
                                     {{"ff_context.net.0.proj"}, d, mlp, "text.mlp_in"},
                                     {{"ff_context.net.2"}, mlp, d, "text.mlp_out"},
                                     {{"norm1.linear"}, d, 6 * d},
                                     {{"norm1_context.linear"}, d, 6 * d}},
                         .tensors = {{"attn.norm_q.weight", {c.head_dim}, {}, "image.norm_q"},
                                     {"attn.norm_k.weight", {c.head_dim}, {}, "image.norm_k"},
                                     {"attn.norm_added_q.weight", {c.head_dim}, {}, "text.norm_q"},
                                     {"attn.norm_added_k.weight", {c.head_dim}, {}, "text.norm_k"}},
                         .given = std::move(of_double),
                         .program = program_of(c, region::flux_double_block)});
  spec.blocks.push_back({.prefix = "single_transformer_blocks.",
                         .count = c.num_single_layers,
                         .linears = {{{"attn.to_q", "attn.to_k", "attn.to_v"}, d, d, "qkv"},
                                     {{"proj_mlp"}, d, mlp, "mlp_in", /*columns_before=*/true},
                                     {{"proj_out"}, d + mlp, d, "out"},
                                     {{"norm.linear"}, d, 3 * d}},
                         .tensors = {{"attn.norm_q.weight", {c.head_dim}, {}, "norm_q"},
                                     {"attn.norm_k.weight", {c.head_dim}, {}, "norm_k"}},
                         .given = {"tokens", "rope", "shift", "scale", "gate"},
                         .program = program_of(c, region::flux_single_block)});
  spec.file_names = [c](const Parameters& parameters) { return file_names(c, parameters); };
  return spec;
}

}  // namespace ditfleet::pipeline
