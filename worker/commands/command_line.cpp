#include "worker/commands/command_line.h"

#include <CLI/CLI.hpp>
#include <iostream>

#include "shared/job/validate.h"
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
                  "text_encoder_2 to nf4; auto: those that the device's memory requires")
      ->type_name("COMPONENT=FORMAT,… | auto");
}

void add_memory_flags(CLI::App& command, config::Sources& sources) {
  const auto add = [&](const char* flag, const std::string& key, const char* type, const char* description) {
    command
        .add_option_function<std::string>(
            flag, [&sources, key](const std::string& value) { sources.sets.push_back(key + "=" + value); }, description)
        ->type_name(type);
  };
  add("--offload", "memory.offload", "auto|none|model|block", "What may leave the device's memory (default auto)");
  add("--memory-limit", "memory.limit", "GIB", "Most device memory that the worker may take");
  add("--reserve-vram", "memory.reserve", "GIB", "Device memory to leave free");
}

Result<config::Settings> settings_of(const config::Sources& sources) {
  auto settings = config::load(sources);
  if (!settings) return Error{Code::kInvalidArgument, settings.error().message, settings.error().param};
  if (auto log = telemetry::configure_log("ditfleet-worker", settings->log.level, settings->log.format); !log)
    return log.error();
  return settings;
}

Result<job::JobSpec> spec_of(const job::FieldFlags& fields, const std::string& out, const job::ModelEntry& model) {
  auto body = job::body_of(fields, "--out", out);
  if (!body) return body.error();
  auto parsed = job::parse_spec(json::value(std::move(*body)));
  if (!parsed) return job::name_the_flag(parsed.error());
  auto complete = job::complete_spec(std::move(*parsed), {{{model.name, model}}, model.name});
  if (!complete) return job::name_the_flag(complete.error());
  return complete;
}

int report(const std::string& command, const Result<void>& done) {
  if (done) return kExitOk;
  std::cerr << "ditfleet-worker " << command << ": " << done.error().message << "\n";
  return done.error().code == Code::kInvalidArgument ? kExitUsage : kExitFailure;
}

}  // namespace ditfleet::worker
