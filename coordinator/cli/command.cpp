#include "coordinator/cli/command.h"

#include <cstdio>

#include "shared/core/child_process.h"
#include "shared/core/listen_address.h"
#include "shared/core/short_numbers.h"

namespace ditfleet::cli {

int report(const std::string& command, const Error& error) {
  const char* hint = error.code == Code::kUnauthenticated ? " (give --key KEY or set DITFLEET_KEY)" : "";
  std::fprintf(stderr, "ditfleet %s: %s%s\n", command.c_str(), error.message.c_str(), hint);
  if (error.code == Code::kCanceled) return kExitInterrupted;
  return error.code == Code::kInvalidArgument ? kExitUsage : kExitFailure;
}

std::filesystem::path own_folder() {
  std::error_code ec;
  return std::filesystem::read_symlink("/proc/self/exe", ec).parent_path();
}

Result<std::string> worker_program() {
  const std::string beside = (own_folder() / "ditfleet-worker").string();
  std::error_code ec;
  if (std::filesystem::exists(beside, ec)) return beside;
  if (auto found = find_program("ditfleet-worker")) return *found;
  return not_found("ditfleet-worker is neither next to this program (" + beside + ") nor on PATH; build or install it");
}

void print(const json::value& value) { std::printf("%s\n", json_text(value).c_str()); }

void add_configuration_flags(CLI::App& command, config::Sources& sources) {
  command.add_option("--config", sources.file, "Configuration file in YAML; config/REFERENCE.md lists the options")
      ->envname("DITFLEET_CONFIG")
      ->type_name("FILE");
  command.add_option("--set", sources.sets, "Set one option, for example worker.count=2; repeatable")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
}

void add_target_flags(CLI::App& command, Target& target) {
  command.add_option("--url", target.url, "URL of the gateway; default: gateway.public_url, else gateway.listen")
      ->envname("DITFLEET_URL")
      ->type_name("URL");
  command.add_option("--key", target.key, "Bearer key of the tenant")->envname("DITFLEET_KEY")->type_name("KEY");
  command.add_option("--ca-file", target.ca_file, "CA certificates in PEM for an https:// URL; default: the system's")
      ->envname("DITFLEET_CA_FILE")
      ->type_name("FILE");
  command.add_flag("--json", target.json, "Print JSON");
  add_configuration_flags(command, target.sources);
}

Result<void> settle(Target& target) {
  const auto settings = config::load(target.sources);
  if (!settings) return settings.error();
  if (!target.url.empty()) return {};
  target.url = settings->gateway.public_url;
  if (!target.url.empty()) return {};
  const auto address = ListenAddress::parse(settings->gateway.listen, "gateway.listen");
  if (!address) return address.error();
  if (address->port == 0) {
    return invalid_argument("gateway.listen has port 0, so the gateway's port is not known; give --url");
  }
  target.url = address->local_url(!settings->gateway.tls_cert_file.empty());
  return {};
}

int run_on(const std::string& command, Target& target, const std::function<Result<void>()>& action) {
  auto done = settle(target);
  if (done) done = action();
  return done ? kExitOk : report(command, done.error());
}

Result<void> print_answer(const Target& target, const Result<json::value>& answer,
                          const std::function<std::string(const json::value&)>& text) {
  if (!answer) return answer.error();
  std::fputs((target.json ? json_text(*answer) + "\n" : text(*answer)).c_str(), stdout);
  return {};
}

}  // namespace ditfleet::cli
