// `ditfleet-worker run`: serves the queue.
#pragma once

#include <string>
#include <vector>

#include "shared/config/settings.h"
#include "shared/core/result.h"
#include "worker/commands/command_line.h"
#include "worker/model_set.h"

namespace ditfleet::worker {

struct RunFlags {
  config::Sources sources;
  std::string redis, name, device, dtype;  // empty: as configured
  std::vector<std::string> models;         // NAME=DIR; replace the configured models
};

void add_run_flags(CLI::App& command, RunFlags& flags);

// The configuration, overridden by the flags. kInvalidArgument: the message contains the flag or key.
Result<config::Settings> settings_of(const RunFlags& flags);

// Loads every configured model. Errors: those of the engine. Blocks.
Result<ModelSet> load_models(const config::Settings& settings);

int run(const RunFlags& flags);

}  // namespace ditfleet::worker
