#include "pipeline/families/flux/slots.h"

#include <functional>

#include "pipeline/families/flux/adapter_names.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kTimestepChannels = 256;  // CombinedTimestepTextProjEmbeddings

using Visit = std::function<void(LinearSlot& slot, const std::vector<std::string>& names, std::int64_t in,
                                 std::int64_t out, LoraColumns columns)>;

// Visits every linear: its names in diffusers, its width in, the width out of each name, and its columns for adapters.
// Calls `block_ended` after the last linear of each block, whose number begins with the double blocks.
void each_linear(
    FluxSlots& s, const FluxConfig& c, std::int64_t adapter_rank, const Visit& visit,
    const std::function<void(std::size_t block)>& block_ended = [](std::size_t) {}) {
  const std::int64_t d = c.width(), mlp = c.mlp_width();
  const LoraColumns none, one{adapter_rank}, three{3 * adapter_rank}, before{adapter_rank, true};
  const auto embedder = [&](EmbedderSlots& slots, const std::string& name, std::int64_t in) {
    visit(slots.first, {name + ".linear_1"}, in, d, none);
    visit(slots.second, {name + ".linear_2"}, d, d, none);
  };
  visit(s.image_in, {"x_embedder"}, c.in_channels, d, none);
  visit(s.text_in, {"context_embedder"}, c.joint_attention_dim, d, none);
  embedder(s.time, "time_text_embed.timestep_embedder", kTimestepChannels);
  if (c.guidance_embeds) embedder(s.guidance, "time_text_embed.guidance_embedder", kTimestepChannels);
  embedder(s.pooled, "time_text_embed.text_embedder", c.pooled_projection_dim);
  for (std::size_t i = 0; i < s.double_blocks.size(); ++i) {
    const std::string at = "transformer_blocks." + std::to_string(i) + ".";
    StreamSlots &image = s.double_blocks[i].image, &text = s.double_blocks[i].text;
    visit(image.modulation, {at + "norm1.linear"}, d, 6 * d, none);
    visit(image.qkv, {at + "attn.to_q", at + "attn.to_k", at + "attn.to_v"}, d, d, three);
    visit(image.out, {at + "attn.to_out.0"}, d, d, one);
    visit(image.mlp_in, {at + "ff.net.0.proj"}, d, mlp, one);
    visit(image.mlp_out, {at + "ff.net.2"}, mlp, d, one);
    visit(text.modulation, {at + "norm1_context.linear"}, d, 6 * d, none);
    visit(text.qkv, {at + "attn.add_q_proj", at + "attn.add_k_proj", at + "attn.add_v_proj"}, d, d, three);
    visit(text.out, {at + "attn.to_add_out"}, d, d, one);
    visit(text.mlp_in, {at + "ff_context.net.0.proj"}, d, mlp, one);
    visit(text.mlp_out, {at + "ff_context.net.2"}, mlp, d, one);
    block_ended(i);
  }
  for (std::size_t i = 0; i < s.single_blocks.size(); ++i) {
    const std::string at = "single_transformer_blocks." + std::to_string(i) + ".";
    SingleBlockSlots& b = s.single_blocks[i];
    visit(b.modulation, {at + "norm.linear"}, d, 3 * d, none);
    visit(b.qkv, {at + "attn.to_q", at + "attn.to_k", at + "attn.to_v"}, d, d, three);
    visit(b.mlp_in, {at + "proj_mlp"}, d, mlp, before);
    visit(b.out, {at + "proj_out"}, d + mlp, d, one);
    block_ended(s.double_blocks.size() + i);
  }
  visit(s.final_modulation, {"norm_out.linear"}, d, 2 * d, none);
  visit(s.image_out, {"proj_out"}, d, c.token_out, none);
}

}  // namespace

FluxSlots bind_flux_slots(const FluxConfig& c, Parameters& p, std::int64_t adapter_rank, const FluxParts& parts) {
  FluxSlots s;
  s.double_blocks.resize(static_cast<std::size_t>(c.num_layers));
  s.single_blocks.resize(static_cast<std::size_t>(c.num_single_layers));
  const auto load = [&](LinearSlot& slot, const std::vector<std::string>& names, std::int64_t in, std::int64_t out,
                        LoraColumns columns) { slot = p.stacked_linear(names, in, out, true, columns); };
  each_linear(s, c, adapter_rank, load, [&](std::size_t block) {
    if (!parts.blocks) return;
    if (block < s.double_blocks.size()) {
      const auto& [image, text] = s.double_blocks[block];
      add_part(*parts.modulation, {&image.modulation, &text.modulation});
      add_part(*parts.blocks, {&image.qkv, &image.out, &image.mlp_in, &image.mlp_out, &text.qkv, &text.out,
                               &text.mlp_in, &text.mlp_out});
    } else {
      const SingleBlockSlots& b = s.single_blocks[block - s.double_blocks.size()];
      add_part(*parts.modulation, {&b.modulation});
      add_part(*parts.blocks, {&b.qkv, &b.mlp_in, &b.out});
    }
  });
  for (std::size_t i = 0; i < s.double_blocks.size(); ++i) {
    const std::string at = "transformer_blocks." + std::to_string(i) + ".attn.";
    DoubleBlockSlots& b = s.double_blocks[i];
    b.image.norm_q = p.tensor(at + "norm_q.weight", {c.head_dim});
    b.image.norm_k = p.tensor(at + "norm_k.weight", {c.head_dim});
    b.text.norm_q = p.tensor(at + "norm_added_q.weight", {c.head_dim});
    b.text.norm_k = p.tensor(at + "norm_added_k.weight", {c.head_dim});
  }
  for (std::size_t i = 0; i < s.single_blocks.size(); ++i) {
    const std::string at = "single_transformer_blocks." + std::to_string(i) + ".attn.";
    s.single_blocks[i].norm_q = p.tensor(at + "norm_q.weight", {c.head_dim});
    s.single_blocks[i].norm_k = p.tensor(at + "norm_k.weight", {c.head_dim});
  }
  return s;
}

FileNames flux_file_names(const FluxConfig& c, const Parameters& p) {
  FileNames names;
  if (!p.contains("img_in.bias")) return names;
  std::vector<BaseLinear> linears;
  FluxSlots s;
  s.double_blocks.resize(static_cast<std::size_t>(c.num_layers));
  s.single_blocks.resize(static_cast<std::size_t>(c.num_single_layers));
  each_linear(s, c, 0,
              [&](LinearSlot&, const std::vector<std::string>& each, std::int64_t in, std::int64_t out, LoraColumns) {
                for (const std::string& name : each) linears.push_back({name, linears.size(), 0, in, out});
              });
  for (const LoraTarget& target : flux_aliases(linears)) {
    if (target.name.find(".processor.") != std::string::npos) continue;  // of XLabs' adapters
    std::int64_t row = 0;
    for (const LoraPiece& piece : target.pieces) {
      auto& rows = names[linears[piece.slot].name];
      rows.insert(piece.first_row == 0 ? rows.begin() : rows.end(), {target.name, row, piece.rows, target.out});
      row += piece.rows;
    }
  }
  const auto norms = [&](const std::string& at, const std::string& suffix, const std::string& bfl) {
    names[at + ".norm_" + suffix + "q.weight"] = {{bfl + ".query_norm.scale", 0, c.head_dim, c.head_dim}};
    names[at + ".norm_" + suffix + "k.weight"] = {{bfl + ".key_norm.scale", 0, c.head_dim, c.head_dim}};
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

FluxSlots flux_formats(const FluxConfig& c, const Parameters& p) {
  FluxSlots s;
  s.double_blocks.resize(static_cast<std::size_t>(c.num_layers));
  s.single_blocks.resize(static_cast<std::size_t>(c.num_single_layers));
  each_linear(s, c, 0,
              [&](LinearSlot& slot, const std::vector<std::string>& names, std::int64_t in, std::int64_t out,
                  LoraColumns) { slot.quantized = p.format_of(names, in, out); });
  return s;
}

std::vector<NamedLinear> named_linears(FluxSlots& s) {
  std::vector<NamedLinear> all;
  FluxConfig any{};  // sizes do not matter, and what the model lacks is undefined
  any.guidance_embeds = true;
  each_linear(s, any, 0,
              [&](LinearSlot& slot, const std::vector<std::string>& names, std::int64_t, std::int64_t, LoraColumns) {
                add_stacked(all, slot, names);
              });
  return all;
}

}  // namespace ditfleet::pipeline
