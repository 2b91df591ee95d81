#include "worker/commands/tokenize.h"

#include <CLI/CLI.hpp>
#include <iostream>

#include "pipeline/engine.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "worker/families.h"

namespace ditfleet::worker {
namespace {

constexpr int kMaxSequenceLength = 512;

json::array ids_of(const std::vector<std::int32_t>& ids) {
  json::array array;
  array.reserve(ids.size());
  for (const auto id : ids) array.emplace_back(id);
  return array;
}

Result<void> run(const TokenizeFlags& flags) {
  auto settings = settings_of(flags.sources);
  if (!settings) return settings.error();
  auto tokenizers = pipeline::Engine::load_tokenizers(families(), flags.model_dir);
  if (!tokenizers) return tokenizers.error();
  return tokenize_lines(**tokenizers, std::cin, std::cout);
}

}  // namespace

Result<void> tokenize_lines(const pipeline::Tokenizers& tokenizers, std::istream& in, std::ostream& out) {
  std::string line;
  for (long number = 1; std::getline(in, line); ++number) {
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
    auto ids = tokenizers.tokenize(std::string(parsed->get_string()), kMaxSequenceLength);
    if (!ids) return Error{ids.error().code, where + "cannot be tokenized: " + ids.error().message, ids.error().param};
    // Flushes each line: a client on a pipe may wait for every answer.
    json::object row;
    for (const auto& [encoder, of_encoder] : *ids) row[encoder] = ids_of(of_encoder);
    out << json::serialize(row) << std::endl;
    if (!out) return internal_error("cannot write the token ids to standard output");
  }
  return {};
}

void add_tokenize_flags(CLI::App& command, TokenizeFlags& flags) {
  command.add_option("--model", flags.model_dir, "Model folder in the diffusers layout")->required()->type_name("DIR");
  add_configuration_flags(command, flags.sources);
  command.footer(
      "Reads one JSON string per line from standard input and prints its token ids by text encoder, such as\n"
      "{\"clip\":[…],\"t5\":[…]}: with begin and end tokens, truncated as in the pipeline, not padded.");
}

int tokenize(const TokenizeFlags& flags) {
  const auto done = run(flags);
  return done ? kExitOk : report("tokenize", done.error());
}

}  // namespace ditfleet::worker
