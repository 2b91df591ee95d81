// Qwen's text model: applies NFC, splits words by Qwen's pattern and encodes them as byte pairs.
#pragma once

#include "pipeline/tokenizers/byte_pair.h"
#include "pipeline/tokenizers/text_model.h"

namespace ditfleet::pipeline {

class QwenText final : public TextModel {
 public:
  explicit QwenText(BytePairEncoder encoder) : encoder_(std::move(encoder)) {}
  std::string normalize(std::string_view text) const override;
  Result<void> tokenize(std::string_view normalized, std::vector<std::int32_t>& ids) const override;
  std::optional<std::int32_t> id_of(std::string_view token) const override { return encoder_.id_of(token); }
  std::int32_t vocabulary_size() const override { return encoder_.size(); }

 private:
  BytePairEncoder encoder_;
};

// What the chat template of Qwen3 makes of one message of the user, up to where the assistant's answer begins. The
// prompt is neither stripped nor escaped: "<|im_end|>" in it is a token. `thinking`: the template's enable_thinking;
// without it, an empty thought follows.
std::string qwen_chat(std::string_view prompt, bool thinking);

}  // namespace ditfleet::pipeline
