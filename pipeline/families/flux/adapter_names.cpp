#include "pipeline/families/flux/adapter_names.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace ditfleet::pipeline {
namespace {

// BFL's name of a linear (the original FLUX code), or XLabs', and diffusers' names whose rows it holds in turn.
struct Alias {
  std::string_view name;
  std::vector<std::string_view> linears;
};
const std::vector<Alias> kDoubleAliases = {
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
const std::vector<Alias> kSingleAliases = {{"linear1", {"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"}},
                                           {"linear2", {"proj_out"}},
                                           {"modulation.lin", {"norm.linear"}},
                                           {"processor.qkv_lora", {"attn.to_q", "attn.to_k", "attn.to_v"}},
                                           {"processor.proj_lora", {"proj_out"}}};
const std::vector<Alias> kOuterAliases = {{"img_in", {"x_embedder"}},
                                          {"txt_in", {"context_embedder"}},
                                          {"time_in.in_layer", {"time_text_embed.timestep_embedder.linear_1"}},
                                          {"time_in.out_layer", {"time_text_embed.timestep_embedder.linear_2"}},
                                          {"vector_in.in_layer", {"time_text_embed.text_embedder.linear_1"}},
                                          {"vector_in.out_layer", {"time_text_embed.text_embedder.linear_2"}},
                                          {"guidance_in.in_layer", {"time_text_embed.guidance_embedder.linear_1"}},
                                          {"guidance_in.out_layer", {"time_text_embed.guidance_embedder.linear_2"}},
                                          {"final_layer.linear", {"proj_out"}}};

// Merges adjacent rows of one matrix into one piece.
void append(std::vector<LoraPiece>& pieces, const LoraPiece& next) {
  if (!pieces.empty() && pieces.back().slot == next.slot &&
      pieces.back().first_row + pieces.back().rows == next.first_row)
    pieces.back().rows += next.rows;
  else
    pieces.push_back(next);
}

// Linears that this transformer may lack and other FLUX models have: dev's guidance embedder, all blocks of a kind.
std::vector<std::string> linears_elsewhere() {
  std::vector<std::string> names;
  const auto add = [&](const std::vector<Alias>& aliases, const std::string& bfl, const std::string& diffusers) {
    for (const Alias& alias : aliases) {
      names.push_back(bfl + std::string(alias.name));
      for (const std::string_view linear : alias.linears) names.push_back(diffusers + std::string(linear));
    }
  };
  add(kDoubleAliases, "double_blocks.0.", "transformer_blocks.0.");
  add(kSingleAliases, "single_blocks.0.", "single_transformer_blocks.0.");
  add(kOuterAliases, "", "");
  return names;
}

}  // namespace

std::vector<LoraTarget> flux_aliases(const std::vector<BaseLinear>& transformer) {
  std::vector<LoraTarget> targets;
  std::unordered_map<std::string_view, const BaseLinear*> by_name;
  std::set<std::string> double_blocks, single_blocks;  // "0", "1"
  const auto note_block = [](std::string_view name, std::string_view prefix, std::set<std::string>& blocks) {
    if (name.starts_with(prefix))
      blocks.emplace(name.substr(prefix.size(), name.find('.', prefix.size()) - prefix.size()));
  };
  for (const BaseLinear& linear : transformer) {
    by_name[linear.name] = &linear;
    note_block(linear.name, "transformer_blocks.", double_blocks);
    note_block(linear.name, "single_transformer_blocks.", single_blocks);
  }
  const auto add = [&](const std::vector<Alias>& aliases, const std::string& bfl, const std::string& diffusers) {
    for (const Alias& alias : aliases) {
      LoraTarget target{bfl + std::string(alias.name), 0, 0, {}};
      const bool whole = std::all_of(alias.linears.begin(), alias.linears.end(), [&](std::string_view name) {
        const auto found = by_name.find(diffusers + std::string(name));
        if (found == by_name.end()) return false;
        const BaseLinear& linear = *found->second;
        target.in = linear.in;
        target.out += linear.out;
        append(target.pieces, {linear.slot, linear.first_row, linear.out});
        if (alias.linears.size() > 1) target.linears.push_back({linear.slot, linear.first_row, linear.out});
        return true;
      });
      if (whole) targets.push_back(std::move(target));
    }
  };
  for (const auto& block : double_blocks)
    add(kDoubleAliases, "double_blocks." + block + ".", "transformer_blocks." + block + ".");
  for (const auto& block : single_blocks)
    add(kSingleAliases, "single_blocks." + block + ".", "single_transformer_blocks." + block + ".");
  add(kOuterAliases, "", "");
  // The last modulation is shift, scale in BFL's code and scale, shift in diffusers'.
  if (const auto last = by_name.find("norm_out.linear"); last != by_name.end()) {
    const BaseLinear& l = *last->second;
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
          {{"transformer", kTransformerPrefixes, std::move(transformer), std::move(aliases), linears_elsewhere()},
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
