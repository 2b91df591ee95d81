// `ditfleet-worker tokenize`: converts prompts, one JSON string per line, into token ids.
#pragma once

#include <istream>
#include <ostream>
#include <string>

#include "shared/config/settings.h"
#include "shared/core/result.h"
#include "worker/commands/command_line.h"

namespace ditfleet::pipeline {
class Tokenizers;
}

namespace ditfleet::worker {

struct TokenizeFlags {
  config::Sources sources;
  std::string model_dir;
};

void add_tokenize_flags(CLI::App& command, TokenizeFlags& flags);
int tokenize(const TokenizeFlags& flags);

// Writes one JSON object per line, with the token ids of each text encoder. kInvalidArgument: a line is not a JSON
// string; the message contains the line. The results of earlier lines have been written.
Result<void> tokenize_lines(const pipeline::Tokenizers& tokenizers, std::istream& in, std::ostream& out);

}  // namespace ditfleet::worker
