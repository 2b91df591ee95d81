#include "pipeline/lora/names.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <initializer_list>
#include <set>
#include <utility>

namespace ditfleet::pipeline {
namespace {

struct Prefix {
  std::string_view text;
  LoraPart part;
};
// Longer prefixes before their own prefixes.
constexpr std::array<Prefix, 13> kPrefixes{{{"model.diffusion_model.", LoraPart::kTransformer},
                                            {"diffusion_model.", LoraPart::kTransformer},
                                            {"transformer.", LoraPart::kTransformer},
                                            {"lora_unet_", LoraPart::kTransformer},
                                            {"lora_transformer_", LoraPart::kTransformer},
                                            {"text_encoders.clip_l.transformer.", LoraPart::kClip},
                                            {"text_encoders.t5xxl.transformer.", LoraPart::kT5},
                                            {"text_encoder_2.", LoraPart::kT5},
                                            {"text_encoder.", LoraPart::kClip},
                                            {"lora_te1_", LoraPart::kClip},
                                            {"lora_te_", LoraPart::kClip},
                                            {"lora_te2_", LoraPart::kT5},
                                            {"lora_te3_", LoraPart::kT5}}};
constexpr std::string_view kPeftPrefix = "base_model.model.";

// BFL's name of a linear (the original FLUX code), or XLabs', and diffusers' names whose rows it holds in turn.
struct Alias {
  std::string_view name;
  std::vector<std::string_view> linears;
};
const std::vector<Alias>& double_aliases() {
  static const std::vector<Alias> aliases = {
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
  return aliases;
}
const std::vector<Alias>& single_aliases() {
  static const std::vector<Alias> aliases = {{"linear1", {"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"}},
                                             {"linear2", {"proj_out"}},
                                             {"modulation.lin", {"norm.linear"}},
                                             {"processor.qkv_lora", {"attn.to_q", "attn.to_k", "attn.to_v"}},
                                             {"processor.proj_lora", {"proj_out"}}};
  return aliases;
}
const std::vector<Alias>& outer_aliases() {
  static const std::vector<Alias> aliases = {{"img_in", {"x_embedder"}},
                                             {"txt_in", {"context_embedder"}},
                                             {"time_in.in_layer", {"time_text_embed.timestep_embedder.linear_1"}},
                                             {"time_in.out_layer", {"time_text_embed.timestep_embedder.linear_2"}},
                                             {"vector_in.in_layer", {"time_text_embed.text_embedder.linear_1"}},
                                             {"vector_in.out_layer", {"time_text_embed.text_embedder.linear_2"}},
                                             {"guidance_in.in_layer", {"time_text_embed.guidance_embedder.linear_1"}},
                                             {"guidance_in.out_layer", {"time_text_embed.guidance_embedder.linear_2"}},
                                             {"final_layer.linear", {"proj_out"}}};
  return aliases;
}

std::string flat(LoraPart part, std::string_view name) {
  std::string text(1, static_cast<char>('0' + static_cast<int>(part)));
  for (char c : name) text.push_back(c == '.' ? '_' : c);
  return text;
}

// Removes the block number: the first number between underscores or dots.
std::string without_block(const std::string& flattened) {
  for (std::size_t at = flattened.find('_'); at != std::string::npos; at = flattened.find('_', at + 1)) {
    std::size_t end = at + 1;
    while (end < flattened.size() && std::isdigit(static_cast<unsigned char>(flattened[end]))) ++end;
    if (end > at + 1 && (end == flattened.size() || flattened[end] == '_'))
      return flattened.substr(0, at + 1) + flattened.substr(end);
  }
  return flattened;
}

// Merges adjacent rows of one matrix into one piece.
void append(std::vector<LoraPiece>& pieces, const LoraPiece& next) {
  if (!pieces.empty() && pieces.back().slot == next.slot &&
      pieces.back().first_row + pieces.back().rows == next.first_row)
    pieces.back().rows += next.rows;
  else
    pieces.push_back(next);
}

}  // namespace

LoraNames::LoraNames(const LoraBase& base) {
  const auto add_all = [&](LoraPart part, const std::vector<BaseLinear>& linears,
                           std::initializer_list<const char*> prefixes) {
    for (const BaseLinear& linear : linears)
      for (const char* prefix : prefixes)
        add(part, prefix + linear.name,
            {part, linear.name, linear.in, linear.out, {{linear.slot, linear.first_row, linear.out}}});
  };
  add_all(LoraPart::kTransformer, base.transformer, {""});
  add_all(LoraPart::kClip, base.clip, {"", "text_model."});
  add_all(LoraPart::kT5, base.t5, {""});
  add_bfl_names(base);
  // Linears of FLUX that this model may not have: dev's guidance embedder, all blocks of a kind.
  const auto note_all = [&](const std::vector<Alias>& aliases, const std::string& bfl, const std::string& diffusers) {
    for (const Alias& alias : aliases) {
      note_shape(LoraPart::kTransformer, bfl + std::string(alias.name));
      for (const std::string_view linear : alias.linears)
        note_shape(LoraPart::kTransformer, diffusers + std::string(linear));
    }
  };
  note_all(double_aliases(), "double_blocks.0.", "transformer_blocks.0.");
  note_all(single_aliases(), "single_blocks.0.", "single_transformer_blocks.0.");
  note_all(outer_aliases(), "", "");
}

void LoraNames::note_shape(LoraPart part, const std::string& name) {
  shapes_of_names_.insert(without_block(flat(part, name)));
}

void LoraNames::add(LoraPart part, const std::string& name, LoraTarget target) {
  note_shape(part, name);
  targets_.emplace(flat(part, name), std::move(target));
}

void LoraNames::add_bfl_names(const LoraBase& base) {
  std::unordered_map<std::string_view, const BaseLinear*> by_name;
  std::set<std::string> double_blocks, single_blocks;  // "0", "1"
  const auto note_block = [](std::string_view name, std::string_view prefix, std::set<std::string>& blocks) {
    if (name.rfind(prefix, 0) == 0)
      blocks.emplace(name.substr(prefix.size(), name.find('.', prefix.size()) - prefix.size()));
  };
  for (const BaseLinear& linear : base.transformer) {
    by_name[linear.name] = &linear;
    note_block(linear.name, "transformer_blocks.", double_blocks);
    note_block(linear.name, "single_transformer_blocks.", single_blocks);
  }
  const auto add_aliases = [&](const std::vector<Alias>& aliases, const std::string& bfl,
                               const std::string& diffusers) {
    for (const Alias& alias : aliases) {
      LoraTarget target{LoraPart::kTransformer, bfl + std::string(alias.name), 0, 0, {}};
      const bool whole = std::all_of(alias.linears.begin(), alias.linears.end(), [&](std::string_view part) {
        const auto found = by_name.find(diffusers + std::string(part));
        if (found == by_name.end()) return false;
        const BaseLinear& linear = *found->second;
        target.in = linear.in;
        target.out += linear.out;
        append(target.pieces, {linear.slot, linear.first_row, linear.out});
        if (alias.linears.size() > 1) target.linears.push_back({linear.slot, linear.first_row, linear.out});
        return true;
      });
      if (whole) add(LoraPart::kTransformer, target.name, target);
    }
  };
  for (const auto& block : double_blocks)
    add_aliases(double_aliases(), "double_blocks." + block + ".", "transformer_blocks." + block + ".");
  for (const auto& block : single_blocks)
    add_aliases(single_aliases(), "single_blocks." + block + ".", "single_transformer_blocks." + block + ".");
  add_aliases(outer_aliases(), "", "");
  // The last modulation is shift, scale in BFL's code and scale, shift in diffusers'.
  if (const auto last = by_name.find("norm_out.linear"); last != by_name.end()) {
    const BaseLinear& l = *last->second;
    const std::int64_t half = l.out / 2;
    const std::string name = "final_layer.adaLN_modulation.1";
    add(LoraPart::kTransformer, name,
        {LoraPart::kTransformer, name, l.in, l.out, {{l.slot, l.first_row + half, half}, {l.slot, l.first_row, half}}});
  }
}

LoraNames::Split LoraNames::split(std::string_view module) {
  if (module.rfind(kPeftPrefix, 0) == 0) module.remove_prefix(kPeftPrefix.size());
  for (const Prefix& prefix : kPrefixes)
    if (module.rfind(prefix.text, 0) == 0) return {prefix.part, module.substr(prefix.text.size())};
  return {LoraPart::kTransformer, module};
}

const LoraTarget* LoraNames::find(std::string_view module) const {
  const Split s = split(module);
  const auto at = targets_.find(flat(s.part, s.rest));
  return at == targets_.end() ? nullptr : &at->second;
}

bool LoraNames::knows_elsewhere(std::string_view module) const {
  const Split s = split(module);
  return shapes_of_names_.count(without_block(flat(s.part, s.rest))) > 0;
}

}  // namespace ditfleet::pipeline
