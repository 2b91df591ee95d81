// A prompt's way to token ids, as diffusers' FluxPipeline gets them from transformers 5.
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
  std::vector<std::int32_t> ids;  // with begin and end marks, at most max_length, not padded
  std::size_t dropped = 0;        // tokens that truncation took away; worth a warning when not 0
};

// Immutable: any thread may call it. Movable.
class Tokenizer {
 public:
  // CLIP's: dir holds tokenizer.json, or vocab.json and merges.txt.
  // T5's: dir holds tokenizer.json, or spiece.model.
  // kNotFound names the files that are missing, kDataCorrupt the file and what is wrong with it.
  static Result<Tokenizer> load_clip(const std::string& dir);
  static Result<Tokenizer> load_t5(const std::string& dir);

  // Any text is fine, the empty one and one that is too long too. kInvalidArgument: not UTF-8, or max_length
  // too small for the marks alone. kDataCorrupt: the vocabulary cannot spell the text.
  Result<Tokenized> encode(std::string_view text, int max_length) const;

  // Fills up to `length` with the padding token, on the side that the configuration says.
  std::vector<std::int32_t> padded(std::vector<std::int32_t> ids, std::size_t length) const;

  // From tokenizer_config.json; CLIP's default is 77, T5's no limit (empty).
  std::optional<int> model_max_length() const { return model_max_length_; }
  std::optional<std::int32_t> id_of(std::string_view token) const;

 private:
  Tokenizer() = default;
  static Result<Tokenizer> assemble(std::unique_ptr<TextModel> model, const TokenizerFolder& folder,
                                    const std::vector<TokenSetting>& class_extra, bool has_begin);
  Result<void> append_ids(std::string_view text, std::vector<std::int32_t>& ids) const;

  std::unique_ptr<TextModel> model_;
  AddedTokens added_;
  std::vector<std::int32_t> begin_, end_;
  std::int32_t pad_id_ = 0;
  std::optional<int> model_max_length_;
  bool truncates_left_ = false, pads_left_ = false;
};

}  // namespace ditfleet::pipeline
