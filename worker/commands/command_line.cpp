#include "worker/commands/command_line.h"

#include <CLI/CLI.hpp>
#include <iostream>

#include "shared/telemetry/log.h"

namespace ditfleet::worker {

void add_configuration_flags(CLI::App& command, config::Sources& sources) {
  command.add_option("--config", sources.file, "YAML configuration (config/REFERENCE.md lists every key)")
      ->envname("DITFLEET_CONFIG")
      ->type_name("FILE");
  command
      .add_option("--set", sources.sets,
                  "Set one configuration key; overrides the environment and the file; repeatable")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
}

Result<config::Settings> settings_of(const config::Sources& sources) {
  auto settings = config::load(sources);
  if (!settings) return Error{Code::kInvalidArgument, settings.error().message, settings.error().param};
  if (auto log = telemetry::configure_log("ditfleet-worker", settings->log.level, settings->log.format); !log)
    return log.error();
  return settings;
}

int report(const std::string& command, const Result<void>& done) {
  if (done) return kExitOk;
  std::cerr << "ditfleet-worker " << command << ": " << done.error().message << "\n";
  return done.error().code == Code::kInvalidArgument ? kExitUsage : kExitFailure;
}

}  // namespace ditfleet::worker
