#include "pipeline/families/flux/prompts.h"

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/tokenizer_classes.h"

namespace ditfleet::pipeline {
namespace {

std::string cut(const std::string& encoder, int length, std::size_t dropped) {
  return "prompt: " + encoder + " accepts " + std::to_string(length) + " tokens; the last " + std::to_string(dropped) +
         " were removed";
}

}  // namespace

Prompts Prompts::load(const std::string& dir) {
  unwrap(check_tokenizer_classes(dir));
  return Prompts(unwrap(Tokenizer::load_clip(dir + "/tokenizer")), unwrap(Tokenizer::load_t5(dir + "/tokenizer_2")));
}

int Prompts::clip_length() const { return *clip_.model_max_length(); }

Result<TokenIds> Prompts::tokenize(const std::string& prompt, int max_sequence_length) const {
  auto clip = clip_.encode(prompt, clip_length());
  if (!clip) return clip.error();
  auto t5 = t5_.encode(prompt, max_sequence_length);
  if (!t5) return t5.error();
  return TokenIds{{"clip", std::move(clip->ids)}, {"t5", std::move(t5->ids)}};
}

PromptIds Prompts::ids(const std::string& prompt, int max_sequence_length) const {
  Tokenized clip = unwrap(clip_.encode(prompt, clip_length()));
  Tokenized t5 = unwrap(t5_.encode(prompt, max_sequence_length));
  PromptIds out;
  if (clip.dropped > 0) out.warnings.push_back(cut("CLIP", clip_length(), clip.dropped));
  if (t5.dropped > 0) out.warnings.push_back(cut("T5", max_sequence_length, t5.dropped) + " (see max_sequence_length)");
  out.clip = clip_.padded(std::move(clip.ids), static_cast<std::size_t>(clip_length()));
  out.t5 = t5_.padded(std::move(t5.ids), static_cast<std::size_t>(max_sequence_length));
  return out;
}

}  // namespace ditfleet::pipeline
