#include "coordinator/cli/command.h"

#include <cstdio>

namespace ditfleet::cli {

int report(const std::string& command, const Error& error) {
  std::fprintf(stderr, "ditfleet %s: %s\n", command.c_str(), error.message.c_str());
  return error.code == Code::kInvalidArgument ? kExitUsage : kExitFailure;
}

void add_configuration_flags(CLI::App& command, config::Sources& sources) {
  command.add_option("--config", sources.file, "Configuration file (YAML; config/REFERENCE.md)")
      ->envname("DITFLEET_CONFIG")
      ->type_name("FILE");
  command.add_option("--set", sources.sets, "One option, as worker.count=2; may be repeated")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
}

void add_target_flags(CLI::App& command, Target& target) {
  command.add_option("--url", target.url, "The service's gateway")
      ->envname("DITFLEET_URL")
      ->type_name("URL")
      ->capture_default_str();
  command.add_option("--key", target.key, "Bearer key of the tenant")
      ->envname("DITFLEET_KEY")
      ->type_name("KEY");
  command.add_flag("--json", target.json, "Print JSON");
}

}  // namespace ditfleet::cli
