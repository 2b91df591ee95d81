// `ditfleet config {check,show,reference}`.
#include <yaml-cpp/yaml.h>

#include <cstdio>

#include "coordinator/cli/command.h"
#include "shared/core/json.h"
#include "shared/families/served.h"
#include "shared/telemetry/metric_table.h"

namespace ditfleet::cli {
namespace {

struct ConfigFlags {
  config::Sources sources;
  bool json = false;
};

// A configuration is valid if it loads and every model's folder can be served.
int check(const ConfigFlags& flags) {
  std::vector<std::string> problems;
  int failure = kExitFailure;
  const auto settings = config::load(flags.sources);
  if (!settings) {
    problems.push_back(settings.error().message);
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
  }
  if (flags.json) {
    json::array list;
    for (const std::string& problem : problems) list.emplace_back(problem);
    print(json::object{{"ok", problems.empty()}, {"problems", list}});
  } else if (problems.empty()) {
    std::printf("the configuration is valid: %zu model(s), gateway %s, %s\n", settings->models.size(),
                settings->gateway.listen.c_str(),
                settings->redis.url.empty() ? "a private Redis" : "a configured Redis");
  } else {
    for (const std::string& problem : problems) std::fprintf(stderr, "ditfleet config check: %s\n", problem.c_str());
  }
  return problems.empty() ? kExitOk : failure;
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
