// `ditfleet config {check,show,reference}`.
#include <yaml-cpp/yaml.h>

#include <cstdio>
#include <filesystem>

#include "coordinator/cli/command.h"
#include "coordinator/cli/terminal.h"
#include "shared/core/certificate.h"
#include "shared/core/json.h"
#include "shared/core/secrets.h"
#include "shared/core/text.h"
#include "shared/core/wall_clock.h"
#include "shared/families/served.h"
#include "shared/telemetry/metric_table.h"

namespace ditfleet::cli {
namespace {

constexpr std::int64_t kSoon = 14 * 86'400;  // seconds

struct ConfigFlags {
  config::Sources sources;
  bool json = false;
};

// Files and folders of others, which must be there.
void check_files(const config::Settings& settings, std::vector<std::string>& problems,
                 std::vector<std::string>& warnings) {
  const auto check_pair = [&](const std::string& section, const std::string& cert_file, const std::string& key_file) {
    if (cert_file.empty() || key_file.empty()) return;
    const auto end = check_certificate(section, cert_file, key_file);
    if (!end) {
      problems.push_back(end.error().message);
    } else if (const auto left = *end - unix_ms() / 1000; left < kSoon) {
      const std::string what = section + ".tls_cert_file: '" + cert_file + "' ";
      if (left < 0)
        problems.push_back(what + "has expired; replace it");
      else
        warnings.push_back(what + "expires in " + short_duration(left * 1'000'000) + "; replace it");
    }
  };
  check_pair("gateway", settings.gateway.tls_cert_file, settings.gateway.tls_key_file);
  check_pair("redis", settings.redis.tls_cert_file, settings.redis.tls_key_file);
  const auto& secret = settings.cache.secret_file;
  if (const auto read = secret.empty() ? Result<std::string>("") : read_secret_file(secret); !read)
    problems.push_back("cache.secret_file: " + read.error().message);
  const auto want = [&](const std::string& key, const std::string& path) {
    std::error_code ec;
    if (!path.empty() && !std::filesystem::exists(path, ec))
      problems.push_back(key + ": '" + path + "' does not exist");
  };
  want("redis.tls_ca_file", settings.redis.tls_ca_file);
  want("compile.nvrtc", settings.compile.nvrtc);
  for (const auto folder : split(settings.loras.folders, ':')) want("loras.folders", std::string(folder));
  for (const auto& [name, model] : settings.models)
    for (const auto& [component, file] : model.files) want("models." + name + "." + component, file);
}

int check(const ConfigFlags& flags) {
  const auto [settings, problems, warnings, exit_code] = check_configuration(flags.sources);
  for (const std::string& warning : warnings) std::fprintf(stderr, "warning: %s\n", warning.c_str());
  if (flags.json) {
    print(json::object{{"ok", problems.empty()}, {"problems", json::value_from(problems)}});
  } else if (problems.empty()) {
    std::printf("the configuration is valid: %zu model(s), gateway %s, %s\n", settings->models.size(),
                settings->gateway.listen.c_str(),
                settings->redis.url.empty() ? "a private Redis" : "a configured Redis");
  } else {
    for (const std::string& problem : problems) std::fprintf(stderr, "ditfleet config check: %s\n", problem.c_str());
  }
  return exit_code;
}

json::value to_json(const YAML::Node& node) {
  if (node.IsMap()) {
    json::object object;
    for (const auto& member : node) object[member.first.Scalar()] = to_json(member.second);
    return object;
  }
  if (node.IsSequence()) {
    json::array array;
    for (const auto& element : node) array.push_back(to_json(element));
    return array;
  }
  // config::to_yaml quotes text (tag "!"). Other scalars are numbers and booleans.
  if (node.Tag() != "!") {
    if (auto value = parse_json(node.Scalar())) return *value;
  }
  return json::value(node.Scalar());
}

int show(const ConfigFlags& flags) {
  const auto settings = config::load(flags.sources);
  if (!settings) return report("config show", settings.error());
  const std::string yaml = config::to_yaml(*settings);
  if (flags.json)
    print(to_json(YAML::Load(yaml)));
  else
    std::fputs(yaml.c_str(), stdout);
  return kExitOk;
}

int metrics(const ConfigFlags& flags) {
  if (!flags.json) {
    std::fputs(telemetry::metrics_markdown().c_str(), stdout);
    return kExitOk;
  }
  json::array rows;
  for (const telemetry::MetricRow& row : telemetry::metric_table())
    rows.push_back(json::object{{"name", row.name},
                                {"type", telemetry::type_name(row.type)},
                                {"labels", json::value_from(row.labels)},
                                {"unit", row.unit},
                                {"help", row.help},
                                {"panel", row.panel}});
  print(rows);
  return kExitOk;
}

// Reads no configuration, so that it works while the configuration is invalid.
int reference(const ConfigFlags& flags) {
  if (!flags.json) {
    std::fputs(config::reference_markdown().c_str(), stdout);
    return kExitOk;
  }
  json::array rows;
  for (const auto& row : config::option_table()) {
    rows.push_back(json::object{{"key", row.key},
                                {"value", row.type},
                                {"default", row.default_value},
                                {"description", row.description},
                                {"environment", row.environment}});
  }
  print(rows);
  return kExitOk;
}

}  // namespace

// A configuration is valid if it loads, the files that it names can be used and every model's folder can be served.
ConfigurationCheck check_configuration(const config::Sources& sources) {
  ConfigurationCheck check;
  auto& problems = check.problems;
  int failure = kExitFailure;
  auto settings = config::load(sources);
  if (!settings) {
    for (const auto line : split(settings.error().message, '\n')) problems.emplace_back(line);
    if (settings.error().code == Code::kInvalidArgument) failure = kExitUsage;  // as in every other command
  } else {
    if (const auto good = config::check_gateway(*settings); !good) {
      problems.push_back(good.error().message);
      failure = kExitUsage;
    }
    for (const auto& [name, model] : settings->models) {
      const auto entry = families::read_model_entry(name, model.path, families::served());
      if (!entry) problems.push_back(entry.error().message);
    }
    check_files(*settings, problems, check.warnings);
    check.settings = std::move(*settings);
  }
  if (!problems.empty()) check.exit_code = failure;
  return check;
}

void add_config(CLI::App& app, Invocation& run) {
  auto* command = app.add_subcommand("config", "Check or show the configuration");
  command->require_subcommand(1);
  const auto add = [&](const char* name, const char* what, int (*action)(const ConfigFlags&)) {
    auto flags = std::make_shared<ConfigFlags>();
    auto* sub = command->add_subcommand(name, what);
    add_configuration_flags(*sub, flags->sources);
    sub->add_flag("--json", flags->json, "Print JSON");
    sub->callback([flags, action, &run] { run = [flags, action] { return action(*flags); }; });
  };
  add("check", "Validate a configuration and its models", check);
  add("show", "Print the effective configuration as YAML", show);
  add("reference", "Print every option as Markdown", reference);
  add("metrics", "Print every metric as Markdown", metrics);
}

}  // namespace ditfleet::cli
