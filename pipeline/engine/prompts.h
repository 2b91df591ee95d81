// Converts prompts to the ids of a model's text encoders.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "pipeline/api/model.h"
#include "pipeline/tokenizers/tokenizer.h"

namespace ditfleet::pipeline {

// The tokenizers of a folder. Const members may be called from any thread.
class Prompts final : public Tokenizers {
 public:
  struct Encoder {
    std::string name, shown;  // "clip" and "CLIP": for tokenize() and for warnings
    std::string ids;          // name of the ids in the dump
    Tokenizer tokenizer;
    int length = 0;     // of every prompt; 0: max_sequence_length
    bool pads = false;  // ids() pads to this length
    std::string (*clean)(const std::string& prompt) = nullptr;
    std::string mask = {};  // if set: ids() adds this entry, 1 for each token and 0 for padding
    int uncounted = 0;      // ids around the prompt that the length does not count
  };
  explicit Prompts(std::vector<Encoder> encoders) : encoders_(std::move(encoders)) {}

  const std::vector<Encoder>& encoders() const { return encoders_; }
  PromptIds ids(const std::string& prompt, int max_sequence_length) const override;
  Result<TokenIds> tokenize(const std::string& prompt, int max_sequence_length) const override;

 private:
  const std::vector<Encoder> encoders_;
};

}  // namespace ditfleet::pipeline
