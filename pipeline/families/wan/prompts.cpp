#include "pipeline/families/wan/prompts.h"

#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/families/wan/prompt_clean.h"

namespace ditfleet::pipeline {

WanPrompts WanPrompts::load(const std::string& dir) {
  return WanPrompts(unwrap(Tokenizer::load_t5(dir + "/tokenizer")));
}

WanPromptIds WanPrompts::ids(const std::string& prompt, int max_sequence_length) const {
  Tokenized made = unwrap(umt5_.encode(prompt_clean(prompt), max_sequence_length));
  WanPromptIds out{std::move(made.ids), {}};
  if (made.dropped > 0)
    out.warnings.push_back("prompt: UMT5 accepts " + std::to_string(max_sequence_length) + " tokens; the last " +
                           std::to_string(made.dropped) + " were removed (see max_sequence_length)");
  return out;
}

Result<TokenIds> WanPrompts::tokenize(const std::string& prompt, int max_sequence_length) const {
  auto made = umt5_.encode(prompt_clean(prompt), max_sequence_length);
  if (!made) return made.error();
  return TokenIds{{"umt5", std::move(made->ids)}};
}

}  // namespace ditfleet::pipeline
