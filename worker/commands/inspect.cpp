#include <CLI/CLI.hpp>
#include <iostream>
#include <limits>
#include <memory>
#include <set>

#include "pipeline/engine.h"
#include "shared/core/json.h"
#include "shared/loras/content.h"
#include "worker/commands/command_line.h"
#include "worker/families.h"

namespace ditfleet::worker {
namespace {

struct Report {
  pipeline::FileReport file;  // `problem` also if it cannot be read, or is an adapter of no use
  std::string adapter;        // what it is, if it is one
};

Report report_of(const std::string& path) {
  auto file = pipeline::Engine::inspect(families(), path);
  if (!file) return {{.problem = file.error().message}, {}};
  Report report{std::move(*file), {}};
  if (!report.file.problem.empty() || !report.file.components.empty()) return report;
  const auto adapter = loras::inspect_file(path, std::numeric_limits<std::int64_t>::max());
  if (!adapter) return {{.problem = adapter.error().message}, {}};
  std::string models;
  for (const std::string& family : report.file.adapter_of) models += (models.empty() ? "" : " and ") + family;
  if (models.empty()) report.file.problem = "it is an adapter, but no supported model has such layers";
  const auto& content = adapter->content;
  report.adapter = "adapter for " + models + ", rank " + std::to_string(content.rank) + ", " + content.dtype + ", " +
                   std::to_string(content.tensors) + " tensors, for ditfleet loras add";
  return report;
}

std::string line_of(const Report& report) {
  const std::string& problem = report.file.problem;
  std::string line;
  std::set<std::pair<std::string, std::vector<std::string>>> said;  // a part may serve several families
  for (const pipeline::FilePart& part : report.file.components) {
    if (!said.emplace(part.text, part.keys).second) continue;
    line += (line.empty() ? "" : "; ") + part.text + ", for models.NAME.";
    for (const std::string& key : part.keys) line += (key == part.keys.front() ? "" : " or ") + key;
    for (const std::string& known : part.known)
      line += (known == part.known.front() ? ", with path: known:" : " or known:") + known;
  }
  if (problem.empty()) return line.empty() ? report.adapter : line;
  return "cannot be used: " + line + (line.empty() ? "" : "; but ") + problem;
}

json::object as_json(const std::string& path, const pipeline::FileReport& file) {
  json::array components;
  for (const pipeline::FilePart& part : file.components)
    components.push_back(json::object{{"family", part.family},
                                      {"text", part.text},
                                      {"keys", json::value_from(part.keys)},
                                      {"known", json::value_from(part.known)}});
  return {{"file", path},
          {"components", std::move(components)},
          {"adapter_of", json::value_from(file.adapter_of)},
          {"problem", file.problem}};
}

}  // namespace

void add_inspect(CLI::App& app, Invocation& invoked) {
  auto& command = *app.add_subcommand("inspect", "Say what files of weights are, and where they fit");
  struct Flags {
    std::vector<std::string> paths;
    bool json = false;
  };
  const auto flags = std::make_shared<Flags>();
  command.add_option("files", flags->paths, "safetensors or GGUF files")->required()->type_name("FILE…");
  command.add_flag("--json", flags->json, "Print one JSON object for each file, with its components and their keys");
  command.footer("Prints one line for each file. Exit code 1: one of them cannot be used; its line says why.");
  command.callback([&invoked, flags] {
    invoked = [flags] {
      bool good = true;
      for (const std::string& path : flags->paths) {
        const Report report = report_of(path);
        good = good && report.file.problem.empty();
        if (flags->json)
          std::cout << json::serialize(as_json(path, report.file)) << "\n";
        else
          std::cout << path << ": " << line_of(report) << "\n";
      }
      return good ? kExitOk : kExitFailure;
    };
  });
}

}  // namespace ditfleet::worker
