// Maps the module names of adapter files to the matrices of a base model.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "pipeline/lora/base.h"

namespace ditfleet::pipeline {

// Names may contain dots or, in kohya's style, underscores. PEFT's base_model.model. may precede any
// prefix. Immutable and thread-safe.
class LoraNames {
 public:
  explicit LoraNames(LoraBase base);

  const LoraBase& base() const { return base_; }
  // The target of a module ("transformer.transformer_blocks.0.attn.to_q"). Null: this base does not have it.
  const LoraTarget* find(std::string_view module) const;
  // Whether this linear exists in another block, or in another model of the family. The adapter was then made for
  // another model.
  bool knows_elsewhere(std::string_view module) const;

  struct Split {
    std::size_t component;
    std::string_view rest;  // without the prefix
  };
  Split split(std::string_view module) const;

 private:
  void add(const std::string& name, LoraTarget target);
  void note_shape(std::size_t component, const std::string& name);

  const LoraBase base_;
  std::vector<std::pair<std::string, std::size_t>> prefixes_;  // with their component; longest first
  std::unordered_map<std::string, LoraTarget> targets_;        // by component and flattened name
  std::unordered_set<std::string> shapes_of_names_;            // the same without block numbers
};

}  // namespace ditfleet::pipeline
