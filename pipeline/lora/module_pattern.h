// A pattern of modules' names as PEFT reads the keys of alpha_pattern: a regular expression for the name or for its end
// after a dot (re.match(rf"(.*\.)?({key})$", name)). Most are plain names.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

class ModulePattern {
 public:
  // kInvalidArgument says why `text` is no regular expression.
  static Result<ModulePattern> parse(std::string_view text);

  // kInvalidArgument where an expression takes too long to match (it comes from a stranger's file). Thread safe.
  Result<bool> matches(std::string_view module) const;

 private:
  struct Expression;
  ModulePattern(std::string text, std::shared_ptr<const Expression> expression)
      : text_(std::move(text)), expression_(std::move(expression)) {}
  std::string text_;
  std::shared_ptr<const Expression> expression_;  // null for a plain name
};

}  // namespace ditfleet::pipeline
