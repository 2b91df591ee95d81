// `ditfleet-worker tokenize`: prompts as JSON strings, one a line, to token ids.
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

// One {"clip":[…],"t5":[…]} for each line. kInvalidArgument names the line that is not a JSON string; what
// came before it has been written.
Result<void> tokenize_lines(const pipeline::Tokenizers& tokenizers, std::istream& in, std::ostream& out);

}  // namespace ditfleet::worker
