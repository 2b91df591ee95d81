#include "pipeline/families/z_image/adapter_names.h"

#include <utility>

#include "pipeline/lora/aliases.h"

namespace ditfleet::pipeline {
namespace {

// Source: diffusers' loaders/single_file_utils.py and loaders/lora_conversion_utils.py.
const std::vector<LinearAlias> kBlock = {{"attention.qkv", {"attention.to_q", "attention.to_k", "attention.to_v"}},
                                         {"attention.out", {"attention.to_out.0"}},
                                         // Without aliases; named for adapters of models with more blocks.
                                         {"feed_forward.w1", {"feed_forward.w1"}},
                                         {"feed_forward.w2", {"feed_forward.w2"}},
                                         {"feed_forward.w3", {"feed_forward.w3"}},
                                         {"adaLN_modulation.0", {"adaLN_modulation.0"}}};
const std::vector<AliasTable> kTables = {
    {"layers.", "layers.", kBlock},
    {"noise_refiner.", "noise_refiner.", kBlock},
    {"context_refiner.", "context_refiner.", kBlock},
    {"",
     "",
     {{"x_embedder", {"all_x_embedder.2-1"}},
      {"final_layer.linear", {"all_final_layer.2-1.linear"}},
      {"final_layer.adaLN_modulation.1", {"all_final_layer.2-1.adaLN_modulation.1"}}}}};

}  // namespace

std::vector<LoraTarget> z_image_aliases(const std::vector<BaseLinear>& transformer) {
  return find_aliases(transformer, kTables);
}

LoraBase z_image_lora_base(std::vector<BaseLinear> transformer) {
  std::vector<LoraTarget> aliases = z_image_aliases(transformer);
  return {"Z-Image",
          {{"transformer", kTransformerPrefixes, std::move(transformer), std::move(aliases), names_of(kTables)}},
          /*takes_diff_b=*/false,
          "all_x_embedder.2-1"};
}

}  // namespace ditfleet::pipeline
