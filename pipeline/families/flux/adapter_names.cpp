#include "pipeline/families/flux/adapter_names.h"

#include <utility>

#include "pipeline/lora/aliases.h"

namespace ditfleet::pipeline {
namespace {

// The names of BFL's code and of XLabs'.
const std::vector<LinearAlias> kDoubleAliases = {
    {"img_attn.qkv", {"attn.to_q", "attn.to_k", "attn.to_v"}},
    {"img_attn.proj", {"attn.to_out.0"}},
    {"img_mlp.0", {"ff.net.0.proj"}},
    {"img_mlp.2", {"ff.net.2"}},
    {"img_mod.lin", {"norm1.linear"}},
    {"txt_attn.qkv", {"attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"}},
    {"txt_attn.proj", {"attn.to_add_out"}},
    {"txt_mlp.0", {"ff_context.net.0.proj"}},
    {"txt_mlp.2", {"ff_context.net.2"}},
    {"txt_mod.lin", {"norm1_context.linear"}},
    {"processor.qkv_lora1", {"attn.to_q", "attn.to_k", "attn.to_v"}},
    {"processor.proj_lora1", {"attn.to_out.0"}},
    {"processor.qkv_lora2", {"attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"}},
    {"processor.proj_lora2", {"attn.to_add_out"}}};
const std::vector<LinearAlias> kSingleAliases = {{"linear1", {"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"}},
                                                 {"linear2", {"proj_out"}},
                                                 {"modulation.lin", {"norm.linear"}},
                                                 {"processor.qkv_lora", {"attn.to_q", "attn.to_k", "attn.to_v"}},
                                                 {"processor.proj_lora", {"proj_out"}}};
const std::vector<LinearAlias> kOuterAliases = {
    {"img_in", {"x_embedder"}},
    {"txt_in", {"context_embedder"}},
    {"time_in.in_layer", {"time_text_embed.timestep_embedder.linear_1"}},
    {"time_in.out_layer", {"time_text_embed.timestep_embedder.linear_2"}},
    {"vector_in.in_layer", {"time_text_embed.text_embedder.linear_1"}},
    {"vector_in.out_layer", {"time_text_embed.text_embedder.linear_2"}},
    {"guidance_in.in_layer", {"time_text_embed.guidance_embedder.linear_1"}},
    {"guidance_in.out_layer", {"time_text_embed.guidance_embedder.linear_2"}},
    {"final_layer.linear", {"proj_out"}}};
// A transformer may lack some of them, such as dev's guidance embedder.
const std::vector<AliasTable> kTables = {{"double_blocks.", "transformer_blocks.", kDoubleAliases},
                                         {"single_blocks.", "single_transformer_blocks.", kSingleAliases},
                                         {"", "", kOuterAliases}};

}  // namespace

std::vector<LoraTarget> flux_aliases(const std::vector<BaseLinear>& transformer) {
  std::vector<LoraTarget> targets = find_aliases(transformer, kTables);
  // The last modulation is shift, scale in BFL's code and scale, shift in diffusers'.
  for (const BaseLinear& l : transformer) {
    if (l.name != "norm_out.linear") continue;
    const std::int64_t half = l.out / 2;
    targets.push_back({"final_layer.adaLN_modulation.1",
                       l.in,
                       l.out,
                       {{l.slot, l.first_row + half, half}, {l.slot, l.first_row, half}}});
  }
  return targets;
}

LoraBase flux_lora_base(std::vector<BaseLinear> transformer, std::vector<BaseLinear> clip, std::vector<BaseLinear> t5) {
  std::vector<LoraTarget> aliases = flux_aliases(transformer), clip_aliases;
  for (const BaseLinear& l : clip)
    clip_aliases.push_back({"text_model." + l.name, l.in, l.out, {{l.slot, l.first_row, l.out}}});
  return {"FLUX",
          {{"transformer", kTransformerPrefixes, std::move(transformer), std::move(aliases), names_of(kTables)},
           {"text_encoder",
            {"text_encoder.", "text_encoders.clip_l.transformer.", "lora_te_", "lora_te1_"},
            std::move(clip),
            std::move(clip_aliases),
            {},
            true},
           {"text_encoder_2",
            {"text_encoder_2.", "text_encoders.t5xxl.transformer.", "lora_te2_", "lora_te3_"},
            std::move(t5),
            {},
            {},
            true}},
          /*takes_diff_b=*/false,
          "x_embedder"};
}

}  // namespace ditfleet::pipeline
