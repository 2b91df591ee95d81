#include "pipeline/engine/prompts.h"

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {
namespace {

int length_of(const Prompts::Encoder& one, int max_sequence_length) {
  return one.length > 0 ? one.length : max_sequence_length;
}

Result<Tokenized> encode(const Prompts::Encoder& one, const std::string& prompt, int max_sequence_length) {
  return one.tokenizer.encode(one.clean ? one.clean(prompt) : prompt,
                              length_of(one, max_sequence_length) + one.uncounted);
}

}  // namespace

PromptIds Prompts::ids(const std::string& prompt, int max_sequence_length) const {
  PromptIds out;
  for (const Encoder& one : encoders_) {
    const int length = length_of(one, max_sequence_length);
    Tokenized made = unwrap(encode(one, prompt, max_sequence_length));
    if (made.dropped > 0)
      out.warnings.push_back("prompt: " + one.shown + " accepts " + std::to_string(length) + " tokens; the last " +
                             std::to_string(made.dropped) + " were removed" +
                             (one.length > 0 ? "" : " (see max_sequence_length)"));
    const std::size_t size = one.pads ? static_cast<std::size_t>(length) : made.ids.size();
    if (!one.mask.empty())
      out.ids[one.mask] = one.tokenizer.padded(std::vector<std::int32_t>(made.ids.size(), 1), size, 0);
    out.ids[one.ids] = one.tokenizer.padded(std::move(made.ids), size);
  }
  return out;
}

Result<TokenIds> Prompts::tokenize(const std::string& prompt, int max_sequence_length) const {
  TokenIds all;
  for (const Encoder& one : encoders_) {
    auto made = encode(one, prompt, max_sequence_length);
    if (!made) return made.error();
    all.emplace_back(one.name, std::move(made->ids));
  }
  return all;
}

}  // namespace ditfleet::pipeline
