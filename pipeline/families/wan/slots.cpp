#include "pipeline/families/wan/slots.h"

#include <functional>

namespace ditfleet::pipeline {
namespace {

constexpr auto kFp32 = c10::ScalarType::Float;

using Visit =
    std::function<void(LinearSlot& slot, const std::vector<std::string>& names, std::int64_t in, std::int64_t out)>;

// Visits every linear in the placement's type: its names in diffusers, its width in and the width out of each name.
// Calls `after_block` with a block whose linears have been visited.
void each_linear(WanSlots& s, const WanConfig& c, const Visit& visit,
                 const std::function<void(const WanBlockSlots& block)>& after_block = nullptr) {
  const std::int64_t d = c.width();
  visit(s.time_proj, {"condition_embedder.time_proj"}, d, 6 * d);
  visit(s.text_first, {"condition_embedder.text_embedder.linear_1"}, c.text_dim, d);
  visit(s.text_second, {"condition_embedder.text_embedder.linear_2"}, d, d);
  for (std::size_t i = 0; i < s.blocks.size(); ++i) {
    const std::string at = "blocks." + std::to_string(i) + ".";
    WanBlockSlots& b = s.blocks[i];
    visit(b.qkv, {at + "attn1.to_q", at + "attn1.to_k", at + "attn1.to_v"}, d, d);
    visit(b.out, {at + "attn1.to_out.0"}, d, d);
    visit(b.cross_q, {at + "attn2.to_q"}, d, d);
    visit(b.cross_kv, {at + "attn2.to_k", at + "attn2.to_v"}, d, d);
    visit(b.cross_out, {at + "attn2.to_out.0"}, d, d);
    visit(b.mlp_in, {at + "ffn.net.0.proj"}, d, c.ffn_dim);
    visit(b.mlp_out, {at + "ffn.net.2"}, c.ffn_dim, d);
    if (after_block) after_block(b);
  }
  visit(s.patch_out, {"proj_out"}, d, 4 * c.out_channels);
}

void each_time_linear(WanSlots& s, const WanConfig& c, const Visit& visit) {
  visit(s.time_first, {"condition_embedder.time_embedder.linear_1"}, c.freq_dim, c.width());
  visit(s.time_second, {"condition_embedder.time_embedder.linear_2"}, c.width(), c.width());
}

}  // namespace

WanSlots bind_wan_slots(const WanConfig& c, Parameters& p, PartSequence& blocks, std::int64_t adapter_rank) {
  const std::int64_t d = c.width();
  WanSlots s;
  s.blocks.resize(static_cast<std::size_t>(c.num_layers));
  s.patch_in.weight = p.tensor("patch_embedding.weight", {d, c.in_channels, 1, 2, 2}).view({d, 4 * c.in_channels});
  s.patch_in.bias = p.tensor("patch_embedding.bias", {d});
  each_time_linear(s, c, [&](LinearSlot& slot, const auto& names, std::int64_t in, std::int64_t out) {
    slot.weight = p.tensor(names[0] + ".weight", {out, in}, kFp32);
    slot.bias = p.tensor(names[0] + ".bias", {out}, kFp32);
  });
  each_linear(
      s, c,
      [&](LinearSlot& slot, const auto& names, std::int64_t in, std::int64_t out) {
        const bool in_block = names[0].starts_with("blocks.");
        slot = p.stacked_linear(names, in, out, /*bias=*/true,
                                {in_block ? static_cast<std::int64_t>(names.size()) * adapter_rank : 0});
      },
      [&](const WanBlockSlots& b) {
        add_part(blocks, {&b.qkv, &b.out, &b.cross_q, &b.cross_kv, &b.cross_out, &b.mlp_in, &b.mlp_out});
      });
  for (std::size_t i = 0; i < s.blocks.size(); ++i) {
    const std::string at = "blocks." + std::to_string(i) + ".";
    WanBlockSlots& b = s.blocks[i];
    b.table = p.tensor(at + "scale_shift_table", {1, 6, d}, kFp32);
    b.norm_q = p.tensor(at + "attn1.norm_q.weight", {d});
    b.norm_k = p.tensor(at + "attn1.norm_k.weight", {d});
    b.cross_norm_q = p.tensor(at + "attn2.norm_q.weight", {d});
    b.cross_norm_k = p.tensor(at + "attn2.norm_k.weight", {d});
    if (c.cross_attn_norm)
      b.norm2 = {p.tensor(at + "norm2.weight", {d}, kFp32), p.tensor(at + "norm2.bias", {d}, kFp32)};
  }
  s.table = p.tensor("scale_shift_table", {1, 2, d}, kFp32);
  return s;
}

WanSlots wan_formats(const WanConfig& c, const Parameters& p) {
  WanSlots s;
  s.blocks.resize(static_cast<std::size_t>(c.num_layers));
  each_linear(s, c, [&](LinearSlot& slot, const auto& names, std::int64_t in, std::int64_t out) {
    slot.quantized = p.format_of(names, in, out);
  });
  return s;
}

std::vector<NamedLinear> named_linears(WanSlots& s) {
  std::vector<NamedLinear> all;
  const auto add = [&](LinearSlot& slot, const auto& names, std::int64_t, std::int64_t) {
    add_stacked(all, slot, names);
  };
  each_time_linear(s, WanConfig{}, add);  // sizes do not matter
  each_linear(s, WanConfig{}, add);
  return all;
}

}  // namespace ditfleet::pipeline
