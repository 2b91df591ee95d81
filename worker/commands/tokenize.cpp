#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>

#include "pipeline/engine.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "worker/commands/command_line.h"
#include "worker/families.h"

namespace ditfleet::worker {
namespace {

struct TokenizeFlags {
  config::Sources sources;
  std::string model_dir;
};

constexpr int kMaxSequenceLength = 512;

// Writes one JSON object per line, with the token ids of each text encoder. kInvalidArgument: a line is not a JSON
// string; the message contains the line. The results of earlier lines have been written.
Result<void> run(const TokenizeFlags& flags) {
  auto settings = settings_of(flags.sources);
  if (!settings) return settings.error();
  auto tokenizers = pipeline::Engine::load_tokenizers(families(), flags.model_dir);
  if (!tokenizers) return tokenizers.error();
  std::string line;
  for (long number = 1; std::getline(std::cin, line); ++number) {
    const std::string where = "line " + std::to_string(number) + " of the input ";
    if (!is_valid_utf8(line)) return invalid_argument(where + "is not UTF-8");
    auto parsed = parse_json(line);
    if (!parsed) {
      const bool escapes = line.find("\\ud") != std::string::npos || line.find("\\uD") != std::string::npos;
      return invalid_argument(where + "is not JSON: " + parsed.error().message +
                              (escapes ? "; escaped surrogates must come in pairs, such as \\ud83d\\ude00" : ""));
    }
    if (!parsed->is_string())
      return invalid_argument(where + "is not a JSON string; each line must be one prompt, such as \"a red circle\"");
    auto ids = (*tokenizers)->tokenize(std::string(parsed->get_string()), kMaxSequenceLength);
    if (!ids) return Error{ids.error().code, where + "cannot be tokenized: " + ids.error().message, ids.error().param};
    // Flushes each line: a client on a pipe may wait for every answer.
    json::object row;
    for (const auto& [encoder, of_encoder] : *ids) row[encoder] = json::array(of_encoder.begin(), of_encoder.end());
    std::cout << json::serialize(row) << std::endl;
    if (!std::cout) return internal_error("cannot write the token ids to standard output");
  }
  return {};
}

}  // namespace

void add_tokenize(CLI::App& app, Invocation& invoked) {
  auto& command = *app.add_subcommand("tokenize", "Print the token ids of prompts");
  const auto kept = std::make_shared<TokenizeFlags>();
  TokenizeFlags& flags = *kept;
  add_model_folder(command, flags.model_dir);
  add_configuration_flags(command, flags.sources);
  command.footer(
      "Reads one JSON string per line from standard input and prints its token ids by text encoder, such as\n"
      "{\"clip\":[…],\"t5\":[…]}: with begin and end tokens, truncated as in the pipeline, not padded.");
  command.callback([kept, &invoked] { invoked = [kept] { return report("tokenize", run(*kept)); }; });
}

}  // namespace ditfleet::worker
