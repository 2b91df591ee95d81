// The options that are lists of maps: compile.rules and worker.warmup_classes.
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

// Whether the path is a list ({"compile", "rules"}) or inside a list ({"compile", "rules", "0", "mode"}).
bool is_list_path(const std::vector<std::string>& path);

// Assigns one field of an entry. If the path is a list, replaces the whole list with the YAML text ("[{mode: none}]").
// kInvalidArgument: the message contains the source, the field and the expected value.
Result<void> apply_list(const Assignment& assignment, Settings& settings);

// Checks that required fields are set and that no minimum is above its maximum.
Result<void> check_lists(const Settings& settings);

// Writes the lists of a section ("compile"), including empty ones, into the open YAML map.
void emit_lists(YAML::Emitter& out, const Settings& settings, std::string_view section);

std::vector<OptionHelp> list_help();

}  // namespace ditfleet::config
