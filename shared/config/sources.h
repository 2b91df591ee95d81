// The sources of option values. Each source is converted into a list of assignments, which settings.cpp applies.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::config {

struct Assignment {
  // {"gateway", "listen"}, {"default_model"}, {"models", NAME, "path"}, {"tenants", NAME, "weight"},
  // {"keys", INDEX, "tenant" | "sha256" | "admin"}, {"compile", "rules", INDEX, FIELD} and the like (lists.h).
  std::vector<std::string> path;
  std::string value;
  std::string where;         // "fleet.yaml:12", "DITFLEET_GATEWAY__LISTEN", "--set gateway.listen"
  std::string problem = {};  // not empty: a structure that no option has, which must be refused with this message
  std::string key() const;   // joined with dots
};

// kInvalidArgument: not YAML, or too large. The message contains FILE:LINE.
Result<std::vector<Assignment>> from_yaml(std::string_view text, const std::string& file);
// Expands a list in the text of one value, "[{mode: none}]", into assignments of its fields. Errors: as in from_yaml.
Result<std::vector<Assignment>> from_list_text(const Assignment& list);
// Parses "key=value". kInvalidArgument: there is no "=".
Result<std::vector<Assignment>> from_sets(const std::vector<std::string>& sets);
// Reads the variables DITFLEET_SECTION__KEY and those of top-level options. Ignores other DITFLEET_… variables.
std::vector<Assignment> from_environment();

// Splits "models.dev-1.0.path" into {"models", "dev-1.0", "path"}; names may contain dots.
std::vector<std::string> split_key(std::string_view key);

}  // namespace ditfleet::config
