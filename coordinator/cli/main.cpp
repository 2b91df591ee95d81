// `ditfleet`: the control plane and the command line.
#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/cli/command.h"
#include "shared/core/command_docs.h"
#include "shared/core/nearest_name.h"
#include "shared/core/revision.h"
#include "shared/core/secrets.h"
#include "shared/core/text.h"

namespace {

using ditfleet::cli::Invocation;

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(sub->get_name());
  return names;
}

// "--stpes" → "; did you mean '--steps'?", from the flags of the typed command.
std::string hint_for(const CLI::App& app, const std::string& message) {
  const CLI::App* typed = &app;
  while (!typed->get_subcommands().empty()) typed = typed->get_subcommands().front();
  const auto dash = message.find("--");
  if (dash == std::string::npos) {
    const auto colon = message.find("not expected: ");
    if (colon == std::string::npos) return {};
    const auto words = std::string_view(message).substr(colon + std::string_view("not expected: ").size());
    for (const auto word : ditfleet::split(words, ' ')) {  // not in the order in which they were typed
      const std::string near = ditfleet::nearest_name(word, command_names(*typed));
      if (!near.empty()) return "; did you mean '" + near + "'?";
    }
    return typed->get_name() == "generate" ? "; put a prompt of several words in quotes, such as \"a red circle\"" : "";
  }
  const std::string flag = message.substr(dash, message.find_first_of(" =,:", dash) - dash);
  std::vector<std::string> known;
  for (; typed != nullptr; typed = typed->get_fallthrough() ? typed->get_parent() : nullptr) {
    for (const CLI::Option* option : typed->get_options()) {
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
    }
  }
  const std::string near = ditfleet::nearest_name(flag, known);
  return near.empty() || near == flag ? std::string() : "; did you mean '" + near + "'?";
}

// The message for a missing or unknown subcommand: `ditfleet jobs lst`. The subcommand is the first word after the
// command that is not a flag.
std::string missing_command(const CLI::App& app, int argc, char** argv) {
  const CLI::App* typed = &app;
  std::string path;
  int at = 1;
  while (!typed->get_subcommands().empty()) {
    typed = typed->get_subcommands().front();
    path += (path.empty() ? "" : " ") + typed->get_name();
    while (at < argc && typed->get_name() != argv[at++]) {
    }
  }
  while (at < argc && argv[at][0] == '-') ++at;
  const auto names = command_names(*typed);
  if (at < argc) return "'" + path + "' has no command '" + argv[at] + "'" + ditfleet::suggestion(argv[at], names);
  return (path.empty() ? "a command is missing" : "'" + path + "' needs a command") + ditfleet::suggestion("", names);
}

bool has_command(const CLI::App& app, const std::string& word) {
  const auto names = command_names(app);
  return std::find(names.begin(), names.end(), word) != names.end();
}

// Moves the flags of a service or a configuration that stand before or within the words of a command behind these
// words, where the commands read them: `--json jobs list` becomes `jobs list --json`.
std::vector<char*> flags_last(const CLI::App& app, int argc, char** argv) {
  constexpr std::string_view kFlags[] = {"--url", "--key", "--ca-file", "--config", "--set", "--json"};
  std::vector<char*> words = {argv[0]}, flags;
  const CLI::App* at = &app;
  int i = 1;
  for (; i < argc; ++i) {
    const std::string_view word = argv[i], name = word.substr(0, word.find('='));
    if (std::find(std::begin(kFlags), std::end(kFlags), name) != std::end(kFlags)) {
      flags.push_back(argv[i]);
      if (name == word && name != "--json" && i + 1 < argc) flags.push_back(argv[++i]);
    } else if (has_command(*at, argv[i])) {
      words.push_back(argv[i]);
      at = at->get_subcommand(argv[i]);
    } else {
      break;
    }
  }
  const auto commands = static_cast<std::ptrdiff_t>(words.size());
  words.insert(words.end(), argv + i, argv + argc);
  words.insert(commands == 1 ? words.end() : words.begin() + commands, flags.begin(), flags.end());
  return words;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("DiTFleet: generates images and videos with diffusion transformers on a fleet of workers", "ditfleet");
  app.set_version_flag("--version", std::string("ditfleet " DITFLEET_VERSION ", revision ") + ditfleet::kRevision,
                       "Print the version");
  app.footer("--url, --key, --ca-file, --json, --config and --set may also stand before the command.");
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Print the help of all commands");
  Invocation run;
  ditfleet::cli::add_up(app, run);
  ditfleet::cli::add_generate(app, run);
  ditfleet::cli::add_batch(app, run);
  ditfleet::cli::add_jobs(app, run);
  ditfleet::cli::add_replay(app, run);
  ditfleet::cli::add_explain(app, run);
  ditfleet::cli::add_models(app, run);
  ditfleet::cli::add_loras(app, run);
  ditfleet::cli::add_keys(app, run);
  ditfleet::cli::add_workers(app, run);
  ditfleet::cli::add_workers_start(app, run);
  ditfleet::cli::add_cache(app, run);
  ditfleet::cli::add_config(app, run);
  ditfleet::cli::add_redis(app, run);
  ditfleet::cli::add_coordinator(app, run);
  ditfleet::cli::add_history(app, run);
  ditfleet::cli::add_capacity(app, run);
  ditfleet::cli::add_version(app, run);
  ditfleet::add_document_commands(app, run, "DiTFleet " DITFLEET_VERSION);

  std::vector<char*> words = flags_last(app, argc, argv);
  if (words.size() > 1 && words[1][0] != '-' && !has_command(app, words[1])) {
    std::fprintf(stderr, "ditfleet: unknown command '%s'%s\n", words[1],
                 ditfleet::suggestion(words[1], command_names(app)).c_str());
    return ditfleet::cli::kExitUsage;
  }
  try {
    app.parse(static_cast<int>(words.size()), words.data());
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help
    std::string message = e.what();
    const bool lacks_command =
        dynamic_cast<const CLI::RequiredError*>(&e) != nullptr && message.find("subcommand") != std::string::npos;
    message = lacks_command ? missing_command(app, static_cast<int>(words.size()), words.data())
                            : message + hint_for(app, message);
    std::fprintf(stderr, "ditfleet: %s (see --help)\n", message.c_str());
    return ditfleet::cli::kExitUsage;
  }
  ditfleet::hide_passwords(argc, argv);
  return run();
}
