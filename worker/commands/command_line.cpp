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

void add_weight_flags(CLI::App& command, std::string& transformer, std::string& quantize) {
  command
      .add_option(
          "--transformer", transformer,
          "The transformer's weights: a safetensors file in diffusers' or BFL's names, in place of the folder's")
      ->type_name("FILE");
  command
      .add_option("--quantize", quantize,
                  "Quantize components while they are loaded: transformer to fp8 or nf4, text_encoder and "
                  "text_encoder_2 to nf4")
      ->type_name("COMPONENT=FORMAT,…");
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
