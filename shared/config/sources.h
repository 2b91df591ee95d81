// The sources of values. Each one becomes a flat list of assignments in its own order, which settings.cpp applies.
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
  std::string where;        // "fleet.yaml:12", "DITFLEET_GATEWAY__LISTEN", "--set gateway.listen"
  std::string key() const;  // joined with dots
};

// kInvalidArgument, with FILE:LINE: not YAML, a duplicate key, or a shape that no option has.
Result<std::vector<Assignment>> from_yaml(std::string_view text, const std::string& file);
// Expands a list given as text in one value, "[{mode: none}]", into assignments below its path. Errors: as from_yaml.
Result<std::vector<Assignment>> from_list_text(const Assignment& list);
// "key=value"; kInvalidArgument without "=".
Result<std::vector<Assignment>> from_sets(const std::vector<std::string>& sets);
// Variables DITFLEET_SECTION__KEY and those of top-level options. Other DITFLEET_… variables are ignored.
std::vector<Assignment> from_environment();

// "models.dev-1.0.path" → {"models", "dev-1.0", "path"}: names may contain dots.
std::vector<std::string> split_key(std::string_view key);

}  // namespace ditfleet::config
