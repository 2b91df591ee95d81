// ditfleet-worker: generates images. `run` serves the queue; `generate`, `plan`, `compile` and `tokenize` use the
// pipeline without any service.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "shared/core/command_docs.h"
#include "shared/core/nearest_name.h"
#include "shared/core/revision.h"
#include "shared/core/secrets.h"
#include "worker/commands/command_line.h"

namespace {

// OpenMP threads spin while they wait for each other, unless the environment says otherwise before the libraries are
// loaded. On busy cores an image then takes several times as long (worker/DECISIONS.md), so the program re-executes
// itself with the environment set.
void wait_without_spinning(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") || ::setenv("OMP_WAIT_POLICY", "passive", 1) != 0) return;
  std::error_code unknown;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", unknown);
  if (!unknown) ::execv(self.c_str(), argv);
  // execv() failed: go on with spinning threads.
}

}  // namespace

int main(int argc, char** argv) {
  wait_without_spinning(argv);
  using namespace ditfleet::worker;
  // A write beyond the file size limit must fail, as on a full disk, instead of ending the process.
  std::signal(SIGXFSZ, SIG_IGN);
  CLI::App app(
      "Generates images and videos with diffusion transformers, as a worker of DiTFleet or on the command line.",
      "ditfleet-worker");
  app.require_subcommand(1);
  app.set_version_flag("--version",
                       std::string("ditfleet-worker " DITFLEET_VERSION ", revision ") + ditfleet::kRevision,
                       "Print the version");
  app.footer(
      "Exit codes: 0 success, 1 failure, 2 wrong usage. Every configuration key can also be set with an\n"
      "environment variable DITFLEET_SECTION__KEY, or in the file named by DITFLEET_CONFIG.");
  Invocation invoked;
  for (const auto add : {add_run, add_generate, add_plan, add_compile, add_tokenize, add_inspect}) add(app, invoked);
  ditfleet::add_document_commands(app, invoked, "DiTFleet " DITFLEET_VERSION);
  if (argc > 1 && argv[1][0] != '-') {
    std::vector<std::string> known;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
      known.push_back(command->get_name());
    if (std::find(known.begin(), known.end(), argv[1]) == known.end()) {
      std::cerr << "ditfleet-worker: unknown command '" << argv[1] << "'" << ditfleet::suggestion(argv[1], known)
                << "\n";
      return kExitUsage;
    }
  }
  try {
    app.parse(argc, argv);
    ditfleet::hide_passwords(argc, argv);
    return invoked();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  } catch (const std::exception& error) {
    std::cerr << "ditfleet-worker: internal error: " << error.what() << "\n";
    return kExitFailure;
  }
}
