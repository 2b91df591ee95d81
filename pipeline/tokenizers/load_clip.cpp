// Tokenizer::load_clip.
#include "pipeline/tokenizers/byte_pair_files.h"
#include "pipeline/tokenizers/clip_text.h"
#include "pipeline/tokenizers/tokenizer.h"

namespace ditfleet::pipeline {

Result<Tokenizer> Tokenizer::load_clip(const std::string& dir) {
  const std::map<std::string, std::string> defaults = {{"unk_token", "<|endoftext|>"},
                                                       {"bos_token", "<|startoftext|>"},
                                                       {"eos_token", "<|endoftext|>"},
                                                       {"pad_token", "<|endoftext|>"}};
  const auto folder = read_tokenizer_folder(dir, defaults);
  if (!folder) return folder.error();
  auto encoder = read_byte_pairs(*folder, folder->named_content("unk_token").value_or("None"), "</w>");
  if (!encoder) return encoder.error();
  // CLIP's class has no extra tokens of its own.
  auto tokenizer =
      assemble(std::make_unique<ClipText>(std::move(*encoder)), *folder,
               folder->additional_special.value_or(std::vector<TokenSetting>()), /*has_begin=*/true, /*has_end=*/true);
  constexpr int kClipLength = 77;  // of every CLIP text encoder; the default
  if (tokenizer && !tokenizer->model_max_length_) tokenizer->model_max_length_ = kClipLength;
  return tokenizer;
}

}  // namespace ditfleet::pipeline
