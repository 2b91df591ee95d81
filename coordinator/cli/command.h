// Shared by all commands of `ditfleet`: exit codes, error reports, common flags.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shared/config/settings.h"
#include "shared/core/json.h"
#include "shared/core/result.h"

namespace ditfleet::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitInterrupted = 130;  // as a shell reports a program that Ctrl-C ended

// The command to run after the command line has been parsed. Returns the exit code.
using Invocation = std::function<int()>;

// Prints "ditfleet COMMAND: message" to stderr. kExitUsage for kInvalidArgument, kExitInterrupted for kCanceled, else
// kExitFailure.
int report(const std::string& command, const Error& error);

// The folder of this program.
std::filesystem::path own_folder();
// The path of ditfleet-worker: next to this program, else on PATH. kNotFound.
Result<std::string> worker_program();

// What `ditfleet config check` says about a configuration.
struct ConfigurationCheck {
  std::optional<config::Settings> settings;  // unless they cannot be loaded
  std::vector<std::string> problems, warnings;
  int exit_code = kExitOk;
};
// Loads a configuration, and reads the files that it names and every model's folder.
ConfigurationCheck check_configuration(const config::Sources& sources);

// Prints JSON on one line of stdout.
void print(const json::value& value);

// Adds --config and --set. The file may also come from DITFLEET_CONFIG.
void add_configuration_flags(CLI::App& command, config::Sources& sources);

// A running service and the key for it.
struct Target {
  std::string url;  // if empty, settle() sets it from the configuration
  std::string key;  // bearer key; empty: none
  bool json = false;
  config::Sources sources;
  std::string ca_file;  // CA certificates of an https:// service; empty: the system's
  bool verify = true;   // false: any certificate will do
};
// Adds --url (DITFLEET_URL), --key (DITFLEET_KEY), --ca-file (DITFLEET_CA_FILE), --json, --config and --set.
void add_target_flags(CLI::App& command, Target& target);
// Reads the configuration. If no URL was given, sets it to gateway.public_url, else to gateway.listen.
// Errors: kInvalidArgument (the configuration is invalid, or gateway.listen has port 0).
Result<void> settle(Target& target);
// Settles the target, runs `action` and reports its error. Returns the exit code.
int run_on(const std::string& command, Target& target, const std::function<Result<void>()>& action);
// Prints the service's answer: with --json as it is, else as `text` words it. Returns the answer's error, if any.
Result<void> print_answer(const Target& target, const Result<json::value>& answer,
                          const std::function<std::string(const json::value&)>& text);

// Each function adds its command to `app`. The command that the user typed sets `run`.
void add_up(CLI::App& app, Invocation& run);
void add_coordinator(CLI::App& app, Invocation& run);
void add_generate(CLI::App& app, Invocation& run);
void add_batch(CLI::App& app, Invocation& run);
void add_jobs(CLI::App& app, Invocation& run);
void add_redis(CLI::App& app, Invocation& run);
void add_replay(CLI::App& app, Invocation& run);
void add_keys(CLI::App& app, Invocation& run);  // and tenants
void add_loras(CLI::App& app, Invocation& run);
void add_models(CLI::App& app, Invocation& run);
void add_workers(CLI::App& app, Invocation& run);
void add_workers_start(CLI::App& app, Invocation& run);  // after add_workers()
void add_explain(CLI::App& app, Invocation& run);
void add_cache(CLI::App& app, Invocation& run);
void add_config(CLI::App& app, Invocation& run);
void add_history(CLI::App& app, Invocation& run);
void add_capacity(CLI::App& app, Invocation& run);
void add_version(CLI::App& app, Invocation& run);

}  // namespace ditfleet::cli
