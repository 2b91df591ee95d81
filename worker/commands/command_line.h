// What the commands of ditfleet-worker share: the sources of the configuration and the exit codes.
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

// The configuration, with the log set as it says, for commands that answer on standard output. kInvalidArgument, with
// the key as param.
Result<config::Settings> settings_of(const config::Sources& sources);

// Prints "ditfleet-worker COMMAND: message" to stderr. Returns kExitUsage for what the caller typed wrong
// (kInvalidArgument), else kExitFailure.
int report(const std::string& command, const Error& error);

}  // namespace ditfleet::worker
