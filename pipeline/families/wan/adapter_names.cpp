#include "pipeline/families/wan/adapter_names.h"

#include <array>
#include <string_view>
#include <utility>

namespace ditfleet::pipeline {
namespace {

// diffusers' name and that of Wan's own code.
using Names = std::pair<std::string_view, std::string_view>;
constexpr std::array<Names, 12> kBlock{{{"attn1.to_q", "self_attn.q"},
                                        {"attn1.to_k", "self_attn.k"},
                                        {"attn1.to_v", "self_attn.v"},
                                        {"attn1.to_out.0", "self_attn.o"},
                                        {"attn2.to_q", "cross_attn.q"},
                                        {"attn2.to_k", "cross_attn.k"},
                                        {"attn2.to_v", "cross_attn.v"},
                                        {"attn2.to_out.0", "cross_attn.o"},
                                        {"attn2.add_k_proj", "cross_attn.k_img"},
                                        {"attn2.add_v_proj", "cross_attn.v_img"},
                                        {"ffn.net.0.proj", "ffn.0"},
                                        {"ffn.net.2", "ffn.2"}}};
constexpr std::array<Names, 8> kOuter{{{"condition_embedder.time_embedder.linear_1", "time_embedding.0"},
                                       {"condition_embedder.time_embedder.linear_2", "time_embedding.2"},
                                       {"condition_embedder.time_proj", "time_projection.1"},
                                       {"condition_embedder.text_embedder.linear_1", "text_embedding.0"},
                                       {"condition_embedder.text_embedder.linear_2", "text_embedding.2"},
                                       {"condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"},
                                       {"condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"},
                                       {"proj_out", "head.head"}}};

// Every name of a linear, in block 0. A model may lack those of the image, and blocks.
std::vector<std::string> linears_elsewhere() {
  std::vector<std::string> names;
  const auto add = [&](const auto& pairs, const std::string& at) {
    for (const auto& [diffusers, own] : pairs) {
      names.push_back(at + std::string(diffusers));
      names.push_back(at + std::string(own));
    }
  };
  add(kBlock, "blocks.0.");
  add(kOuter, "");
  return names;
}

}  // namespace

std::string wan_own_name(std::string_view name) {
  for (const auto& [diffusers, own] : kOuter)
    if (name == diffusers) return std::string(own);
  const auto end = name.starts_with("blocks.") ? name.find('.', 7) : name.npos;
  if (end == name.npos) return {};
  for (const auto& [diffusers, own] : kBlock)
    if (name.substr(end + 1) == diffusers) return std::string(name.substr(0, end + 1)).append(own);
  return {};
}

LoraBase wan_lora_base(std::vector<BaseLinear> transformer) {
  std::vector<LoraTarget> aliases;
  for (const BaseLinear& l : transformer) {
    LoraTarget target{wan_own_name(l.name), l.in, l.out, {{l.slot, l.first_row, l.out}}};
    if (target.name.empty()) continue;
    target.takes_difference = target.name == "head.head";
    target.takes_lone_bias = target.name != "time_projection.1" && !target.name.starts_with("img_emb.");
    aliases.push_back(std::move(target));
  }
  return {"Wan",
          {{"transformer", kTransformerPrefixes, std::move(transformer), std::move(aliases), linears_elsewhere()}},
          /*takes_diff_b=*/true};
}

}  // namespace ditfleet::pipeline
