// Converts a prompt to the ids of Wan's text encoder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/api/model.h"
#include "pipeline/tokenizers/tokenizer.h"

namespace ditfleet::pipeline {

struct WanPromptIds {
  std::vector<std::int32_t> ids;      // without padding, at most max_sequence_length
  std::vector<std::string> warnings;  // "prompt: …" if ids were removed
};

// Const members may be called from any thread.
class WanPrompts final : public Tokenizers {
 public:
  // Throws the errors of Tokenizer::load_t5 as Failure.
  static WanPrompts load(const std::string& dir);
  // Cleans the prompt (prompt_clean.h) and converts it. Throws the errors of Tokenizer::encode as Failure.
  WanPromptIds ids(const std::string& prompt, int max_sequence_length) const;
  Result<TokenIds> tokenize(const std::string& prompt, int max_sequence_length) const override;

 private:
  explicit WanPrompts(Tokenizer umt5) : umt5_(std::move(umt5)) {}
  Tokenizer umt5_;
};

}  // namespace ditfleet::pipeline
