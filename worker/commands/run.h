// `ditfleet-worker run`: the service as a process.
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
  std::vector<std::string> models;         // NAME=DIR; if any, only these
};

void add_run_flags(CLI::App& command, RunFlags& flags);

// The configuration with the flags on top. kInvalidArgument says which flag or key is wrong.
Result<config::Settings> settings_of(const RunFlags& flags);

// Loads every configured model. kInvalidArgument, kNotFound, kDataCorrupt as the engine says. Blocks.
Result<ModelSet> load_models(const config::Settings& settings);

int run(const RunFlags& flags);

}  // namespace ditfleet::worker
