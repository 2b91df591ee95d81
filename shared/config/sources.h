// Where values come from. Each source becomes a flat list of assignments, in its own order; settings.cpp
// applies them all in the same way.
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

// kInvalidArgument: not YAML, a key twice, or a shape that no option has, with FILE:LINE.
Result<std::vector<Assignment>> from_yaml(std::string_view text, const std::string& file);
// A list given as text in one value, "[{mode: none}]", as assignments below its path. kInvalidArgument as from_yaml.
Result<std::vector<Assignment>> from_list_text(const Assignment& list);
// "key=value"; kInvalidArgument without "=".
Result<std::vector<Assignment>> from_sets(const std::vector<std::string>& sets);
// Variables DITFLEET_SECTION__KEY and those of top-level options; other DITFLEET_… variables are not ours.
std::vector<Assignment> from_environment();

// "models.flux.1-dev.path" → {"models", "flux.1-dev", "path"}: names may contain dots.
std::vector<std::string> split_key(std::string_view key);

}  // namespace ditfleet::config
