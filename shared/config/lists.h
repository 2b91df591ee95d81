// Options that are lists of maps: compile.rules and worker.warmup_classes. What the option table is for scalars.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shared/config/settings.h"
#include "shared/config/sources.h"

namespace YAML {
class Emitter;
}

namespace ditfleet::config {

// Whether this path is such a list ({"compile", "rules"}) or lies in one ({"compile", "rules", "0", "mode"}).
bool is_list_path(const std::vector<std::string>& path);

// One field of one entry; or, where the path is the list's own, the whole list as YAML text ("[{mode: none}]"), which
// replaces what weaker sources said. kInvalidArgument names the place, the field and what would be right.
Result<void> apply_list(const Assignment& assignment, Settings& settings);

// What no field can say alone: an entry without a field that it needs, bounds the wrong way round.
Result<void> check_lists(const Settings& settings);

// The lists of a section ("compile") as YAML into the open map, empty ones too.
void emit_lists(YAML::Emitter& out, const Settings& settings, std::string_view section);

std::vector<OptionHelp> list_help();

}  // namespace ditfleet::config
