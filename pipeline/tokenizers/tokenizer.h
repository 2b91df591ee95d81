// Converts a prompt to token ids, identical to those of transformers 5.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/tokenizers/added_tokens.h"
#include "pipeline/tokenizers/text_model.h"
#include "pipeline/tokenizers/tokenizer_folder.h"
#include "shared/core/result.h"

namespace ditfleet::pipeline {

struct Tokenized {
  std::vector<std::int32_t> ids;  // with begin and end tokens, at most max_length, not padded
  std::size_t dropped = 0;        // tokens removed by truncation; callers warn about them
};

// Immutable and thread-safe. Movable.
class Tokenizer {
 public:
  // For CLIP and Qwen, `dir` must contain tokenizer.json, or vocab.json and merges.txt. For T5, it must contain
  // tokenizer.json or spiece.model. kNotFound: the message lists the missing files. kDataCorrupt: it contains the file
  // and the problem.
  static Result<Tokenizer> load_clip(const std::string& dir);
  // `qwen3`: the folder must also have the chat template whose text qwen_chat() (qwen_text.h) writes; encode() does not
  // add it.
  static Result<Tokenizer> load_qwen(const std::string& dir, bool qwen3 = true);
  // `otherwise`: the content of a spiece.model, for a folder that has neither file.
  static Result<Tokenizer> load_t5(const std::string& dir, const std::string& otherwise = {});

  // Accepts empty text; truncates text that is too long. kInvalidArgument: the text is not UTF-8, or max_length is too
  // small for the begin and end tokens. kDataCorrupt: the vocabulary cannot represent the text.
  Result<Tokenized> encode(std::string_view text, int max_length) const;

  // Pads to `length` with the padding token or `filler`, on the configured side.
  std::vector<std::int32_t> padded(std::vector<std::int32_t> ids, std::size_t length,
                                   std::optional<std::int32_t> filler = {}) const;

  // From tokenizer_config.json. Default: 77 for CLIP, which always has one; no limit (empty) for T5 and Qwen.
  std::optional<int> model_max_length() const { return model_max_length_; }
  std::optional<std::int32_t> id_of(std::string_view token) const;

 private:
  Tokenizer() = default;
  static Result<Tokenizer> assemble(std::unique_ptr<TextModel> model, const TokenizerFolder& folder,
                                    const std::vector<TokenSetting>& class_extra, bool has_begin, bool has_end);
  Result<void> append_ids(std::string_view text, std::vector<std::int32_t>& ids) const;

  std::unique_ptr<TextModel> model_;
  AddedTokens added_;
  std::vector<std::int32_t> begin_, end_;
  std::int32_t pad_id_ = 0;
  std::optional<int> model_max_length_;
  bool truncates_left_ = false, pads_left_ = false;
};

}  // namespace ditfleet::pipeline
