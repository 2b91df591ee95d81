#include "pipeline/families/flux2/adapter_names.h"

#include <utility>

#include "pipeline/lora/aliases.h"

namespace ditfleet::pipeline {
namespace {

// Source: diffusers' loaders/lora_conversion_utils.py.
const std::vector<LinearAlias> kDoubleAliases = {
    {"img_attn.qkv", {"attn.to_q", "attn.to_k", "attn.to_v"}},
    {"img_attn.proj", {"attn.to_out.0"}},
    {"img_mlp.0", {"ff.linear_in"}},
    {"img_mlp.2", {"ff.linear_out"}},
    {"txt_attn.qkv", {"attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"}},
    {"txt_attn.proj", {"attn.to_add_out"}},
    {"txt_mlp.0", {"ff_context.linear_in"}},
    {"txt_mlp.2", {"ff_context.linear_out"}}};
const std::vector<LinearAlias> kSingleAliases = {{"linear1", {"attn.to_qkv_mlp_proj"}}, {"linear2", {"attn.to_out"}}};
const std::vector<LinearAlias> kOuterAliases = {
    {"img_in", {"x_embedder"}},
    {"txt_in", {"context_embedder"}},
    {"time_in.in_layer", {"time_guidance_embed.timestep_embedder.linear_1"}},
    {"time_in.out_layer", {"time_guidance_embed.timestep_embedder.linear_2"}},
    {"guidance_in.in_layer", {"time_guidance_embed.guidance_embedder.linear_1"}},
    {"guidance_in.out_layer", {"time_guidance_embed.guidance_embedder.linear_2"}},
    {"double_stream_modulation_img.lin", {"double_stream_modulation_img.linear"}},
    {"double_stream_modulation_txt.lin", {"double_stream_modulation_txt.linear"}},
    {"single_stream_modulation.lin", {"single_stream_modulation.linear"}},
    {"final_layer.linear", {"proj_out"}},
    {"final_layer.adaLN_modulation.1", {"norm_out.linear"}}};
const std::vector<AliasTable> kTables = {{"double_blocks.", "transformer_blocks.", kDoubleAliases},
                                         {"single_blocks.", "single_transformer_blocks.", kSingleAliases},
                                         {"", "", kOuterAliases}};

}  // namespace

std::vector<LoraTarget> flux2_aliases(const std::vector<BaseLinear>& transformer) {
  return find_aliases(transformer, kTables);
}

LoraBase flux2_lora_base(std::vector<BaseLinear> transformer) {
  std::vector<LoraTarget> aliases = flux2_aliases(transformer);
  for (LoraTarget& alias : aliases)
    alias.in_kohya = alias.name.find("odulation") == alias.name.npos && !alias.name.starts_with("guidance_in");
  return {"FLUX.2",
          {{"transformer", kTransformerPrefixes, std::move(transformer), std::move(aliases), names_of(kTables)}},
          /*takes_diff_b=*/false,
          "x_embedder"};
}

}  // namespace ditfleet::pipeline
