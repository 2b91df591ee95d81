// A module name pattern with the semantics of PEFT's alpha_pattern keys: a regular expression that matches the name, or
// its end after a dot (re.match(rf"(.*\.)?({key})$", name)). Most patterns are plain names.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

class ModulePattern {
 public:
  // kInvalidArgument: `text` is not a regular expression; the message says why.
  static Result<ModulePattern> parse(std::string_view text);

  // kInvalidArgument: matching takes too long; patterns come from untrusted files. Thread-safe.
  Result<bool> matches(std::string_view module) const;

 private:
  struct Expression;
  ModulePattern(std::string text, std::shared_ptr<const Expression> expression)
      : text_(std::move(text)), expression_(std::move(expression)) {}
  std::string text_;
  std::shared_ptr<const Expression> expression_;  // null for a plain name
};

}  // namespace ditfleet::pipeline
