#include "pipeline/lora/aliases.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

namespace ditfleet::pipeline {
namespace {

// Merges adjacent rows of one matrix into one piece.
void append(std::vector<LoraPiece>& pieces, const LoraPiece& next) {
  if (!pieces.empty() && pieces.back().slot == next.slot &&
      pieces.back().first_row + pieces.back().rows == next.first_row)
    pieces.back().rows += next.rows;
  else
    pieces.push_back(next);
}

}  // namespace

std::vector<LoraTarget> find_aliases(const std::vector<BaseLinear>& linears, const std::vector<AliasTable>& tables) {
  std::vector<LoraTarget> targets;
  std::unordered_map<std::string_view, const BaseLinear*> by_name;
  for (const BaseLinear& linear : linears) by_name[linear.name] = &linear;
  const auto add = [&](const LinearAlias& alias, const std::string& own, const std::string& diffusers) {
    LoraTarget target{own + std::string(alias.name), 0, 0, {}};
    for (const std::string_view name : alias.linears) {
      const auto found = by_name.find(diffusers + std::string(name));
      if (found == by_name.end()) return;
      const BaseLinear& linear = *found->second;
      target.in = linear.in;
      target.out += linear.out;
      append(target.pieces, {linear.slot, linear.first_row, linear.out});
      if (alias.linears.size() > 1) target.linears.push_back({linear.slot, linear.first_row, linear.out});
    }
    targets.push_back(std::move(target));
  };
  for (const AliasTable& table : tables) {
    std::set<std::string> blocks;  // "0.", "1."
    if (table.diffusers.empty()) blocks.emplace();
    for (const BaseLinear& linear : linears) {
      const std::size_t begin = table.diffusers.size();
      if (begin > 0 && linear.name.starts_with(table.diffusers))
        blocks.insert(linear.name.substr(begin, linear.name.find('.', begin) + 1 - begin));
    }
    for (const std::string& block : blocks)
      for (const LinearAlias& alias : table.aliases)
        add(alias, std::string(table.own) + block, std::string(table.diffusers) + block);
  }
  return targets;
}

std::vector<std::string> names_of(const std::vector<AliasTable>& tables) {
  std::vector<std::string> names;
  for (const AliasTable& table : tables) {
    const std::string block = table.diffusers.empty() ? "" : "0.";
    for (const LinearAlias& alias : table.aliases) {
      names.push_back(std::string(table.own) + block + std::string(alias.name));
      for (const std::string_view linear : alias.linears)
        names.push_back(std::string(table.diffusers) + block + std::string(linear));
    }
  }
  return names;
}

}  // namespace ditfleet::pipeline
