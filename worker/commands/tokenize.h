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

// Writes one object of token ids by text encoder per line. kInvalidArgument names a line that is not a JSON string; the
// lines before it have been written.
Result<void> tokenize_lines(const pipeline::Tokenizers& tokenizers, std::istream& in, std::ostream& out);

}  // namespace ditfleet::worker
