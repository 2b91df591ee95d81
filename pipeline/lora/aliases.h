// Names that files of other origin than diffusers have for the linears of a transformer.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "pipeline/lora/base.h"

namespace ditfleet::pipeline {

// A name, and diffusers' names of the linears whose rows it has in turn.
struct LinearAlias {
  std::string_view name;
  std::vector<std::string_view> linears;
};

// Aliases in all blocks of a kind. `own` and `diffusers` stand before a block's number ("double_blocks."); both are
// empty for linears outside of blocks.
struct AliasTable {
  std::string_view own, diffusers;
  std::vector<LinearAlias> aliases;
};

// The aliases whose linears are all among `linears`.
std::vector<LoraTarget> find_aliases(const std::vector<BaseLinear>& linears, const std::vector<AliasTable>& tables);

// Every name in the tables, in block 0 (LoraComponent::elsewhere).
std::vector<std::string> names_of(const std::vector<AliasTable>& tables);

}  // namespace ditfleet::pipeline
