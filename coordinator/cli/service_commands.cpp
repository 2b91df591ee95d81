// `ditfleet coordinator` and `ditfleet version`.
#include <cstdio>

#include "coordinator/cli/command.h"
#include "coordinator/service.h"
#include "shared/core/json.h"
#include "shared/core/revision.h"
#include "shared/telemetry/process.h"

namespace ditfleet::cli {

void add_coordinator(CLI::App& app, Invocation& run) {
  struct Flags {
    config::Sources sources;
    std::string listen, redis;
    bool json = false;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("coordinator", "Run the gateway and the scheduler on an existing Redis");
  add_configuration_flags(*command, flags->sources);
  command->add_option("--listen", flags->listen, "Address of the gateway")->type_name("HOST:PORT");
  command->add_option("--redis", flags->redis, "URL of the queue's Redis")->type_name("URL");
  command->add_flag("--json", flags->json, "Print {\"gateway\": URL} once the service is ready");
  command->callback([flags, &run] {
    run = [flags] {
      if (!flags->listen.empty()) flags->sources.sets.push_back("gateway.listen=" + flags->listen);
      if (!flags->redis.empty()) flags->sources.sets.push_back("redis.url=" + flags->redis);
      const auto settings = config::load(flags->sources);
      if (!settings) return report("coordinator", settings.error());
      if (settings->redis.url.empty()) {
        return report("coordinator", invalid_argument("redis.url is not set; give the queue's Redis with "
                                                      "--redis, or use `ditfleet up`, which starts one"));
      }
      telemetry::show_build(DITFLEET_VERSION, kRevision);
      return run_coordinator(*settings, [json = flags->json](const std::string& url) {
        if (json)
          print(json::object{{"gateway", url}});
        else
          std::printf("ready: %s\n", url.c_str());
        std::fflush(stdout);
      });
    };
  });
}

void add_version(CLI::App& app, Invocation& run) {
  auto as_json = std::make_shared<bool>(false);
  auto sources = std::make_shared<config::Sources>();
  auto* command = app.add_subcommand("version", "Print the version");
  command->add_flag("--json", *as_json, "Print JSON");
  add_configuration_flags(*command, *sources);
  command->callback([as_json, sources, &run] {
    run = [as_json, sources] {
      if (const auto settings = config::load(*sources); !settings) return report("version", settings.error());
      if (*as_json)
        print(json::object{{"version", DITFLEET_VERSION}, {"revision", kRevision}});
      else
        std::printf("ditfleet %s, revision %s\n", DITFLEET_VERSION, kRevision);
      return kExitOk;
    };
  });
}

}  // namespace ditfleet::cli
