// Shared by the commands of ditfleet-worker: configuration flags and exit codes.
#pragma once

#include <string>

#include "shared/config/settings.h"
#include "shared/core/result.h"

namespace CLI {
class App;
}

namespace ditfleet::worker {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

// Adds --config and --set to a command.
void add_configuration_flags(CLI::App& command, config::Sources& sources);

// Loads the configuration and sets up the log. kInvalidArgument: `param` is the key at fault.
Result<config::Settings> settings_of(const config::Sources& sources);

// Prints "ditfleet-worker COMMAND: message" to stderr. Returns kExitUsage for kInvalidArgument, else kExitFailure.
int report(const std::string& command, const Error& error);

}  // namespace ditfleet::worker
