#include <CLI/CLI.hpp>
#include <iostream>
#include <limits>
#include <memory>

#include "pipeline/engine.h"
#include "shared/loras/content.h"
#include "worker/commands/command_line.h"
#include "worker/families.h"

namespace ditfleet::worker {
namespace {

// What a file is, in one line; or why it is of no use.
Result<std::string> line_of(const std::string& path) {
  auto report = pipeline::Engine::inspect(families(), path);
  if (!report) return report.error();
  std::string line;
  for (const std::string& component : report->components) line += (line.empty() ? "" : "; ") + component;
  if (!report->problem.empty()) return invalid_argument(line + (line.empty() ? "" : "; but ") + report->problem);
  if (!line.empty()) return line;
  const auto adapter = loras::inspect_file(path, std::numeric_limits<std::int64_t>::max());
  if (!adapter) return adapter.error();
  const auto& content = adapter->content;
  for (const std::string& family : report->adapter_of) line += (line.empty() ? "" : " and ") + family;
  if (line.empty()) return invalid_argument("it is an adapter, but no supported model has such layers");
  return "adapter for " + line + ", rank " + std::to_string(content.rank) + ", " + content.dtype + ", " +
         std::to_string(content.tensors) + " tensors, for ditfleet loras add";
}

}  // namespace

void add_inspect(CLI::App& app, Invocation& invoked) {
  auto& command = *app.add_subcommand("inspect", "Say what files of weights are, and where they fit");
  const auto paths = std::make_shared<std::vector<std::string>>();
  command.add_option("files", *paths, "safetensors or GGUF files")->required()->type_name("FILE…");
  command.footer("Prints one line for each file. Exit code 1: one of them cannot be used; its line says why.");
  command.callback([&invoked, paths] {
    invoked = [paths] {
      bool good = true;
      for (const std::string& path : *paths) {
        const auto line = line_of(path);
        good = good && line.ok();
        std::cout << path << ": " << (line ? *line : "cannot be used: " + line.error().message) << "\n";
      }
      return good ? kExitOk : kExitFailure;
    };
  });
}

}  // namespace ditfleet::worker
