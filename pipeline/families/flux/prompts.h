// Converts a prompt to the ids for both text encoders.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/api/model.h"
#include "pipeline/tokenizers/tokenizer.h"

namespace ditfleet::pipeline {

struct PromptIds {
  std::vector<std::int32_t> clip, t5;  // padded: CLIP's to model_max_length, T5's to max_sequence_length
  std::vector<std::string> warnings;   // "prompt: …" for each encoder whose ids were truncated
};

// Both tokenizers of a folder. Const members may be called from any thread.
class Prompts final : public Tokenizers {
 public:
  // Throws the errors of check_tokenizer_classes, Tokenizer::load_clip and load_t5 as Failure.
  static Prompts load(const std::string& dir);
  int clip_length() const;  // CLIP's model_max_length: the number of ids of every prompt
  // Throws the errors of Tokenizer::encode as Failure.
  PromptIds ids(const std::string& prompt, int max_sequence_length) const;
  Result<TokenIds> tokenize(const std::string& prompt, int max_sequence_length) const override;

 private:
  Prompts(Tokenizer clip, Tokenizer t5) : clip_(std::move(clip)), t5_(std::move(t5)) {}
  Tokenizer clip_, t5_;
};

}  // namespace ditfleet::pipeline
