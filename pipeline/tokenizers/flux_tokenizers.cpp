// Engine::load_tokenizers: both tokenizers of a diffusers FLUX folder.
#include "pipeline/engine.h"
#include "pipeline/tokenizers/tokenizer.h"
#include "pipeline/tokenizers/tokenizer_classes.h"

namespace ditfleet::pipeline {
namespace {

class FluxTokenizers final : public Tokenizers {
 public:
  FluxTokenizers(Tokenizer clip, Tokenizer t5) : clip_(std::move(clip)), t5_(std::move(t5)) {}

  Result<TokenIds> tokenize(const std::string& prompt, int max_sequence_length) const override {
    auto clip = clip_.encode(prompt, *clip_.model_max_length());
    if (!clip) return clip.error();
    auto t5 = t5_.encode(prompt, max_sequence_length);
    if (!t5) return t5.error();
    return TokenIds{std::move(clip->ids), std::move(t5->ids)};
  }

 private:
  Tokenizer clip_, t5_;
};

}  // namespace

Result<std::unique_ptr<Tokenizers>> Engine::load_tokenizers(const std::string& dir) {
  if (auto checked = check_tokenizer_classes(dir); !checked) return checked.error();
  auto clip = Tokenizer::load_clip(dir + "/tokenizer");
  if (!clip) return clip.error();
  auto t5 = Tokenizer::load_t5(dir + "/tokenizer_2");
  if (!t5) return t5.error();
  return std::unique_ptr<Tokenizers>(std::make_unique<FluxTokenizers>(std::move(*clip), std::move(*t5)));
}

}  // namespace ditfleet::pipeline
