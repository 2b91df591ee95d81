#include "worker/command_line.h"

#include <CLI/CLI.hpp>
#include <iostream>

namespace ditfleet::worker {

void add_configuration_flags(CLI::App& command, config::Sources& sources) {
  command.add_option("--config", sources.file, "YAML configuration (config/REFERENCE.md lists every key)")
      ->type_name("FILE");
  command.add_option("--set", sources.sets, "Set one configuration key; wins over environment and file; repeatable")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->take_all();
}

int report(const std::string& command, const Error& error) {
  std::cerr << "ditfleet-worker " << command << ": " << error.message << "\n";
  return error.code == Code::kInvalidArgument ? kExitUsage : kExitFailure;
}

}  // namespace ditfleet::worker
