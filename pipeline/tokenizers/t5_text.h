// T5's text model: precompiled charsmap, words split at white space and prefixed by "▁", unigram pieces.
#pragma once

#include "pipeline/tokenizers/charsmap.h"
#include "pipeline/tokenizers/text_model.h"
#include "pipeline/tokenizers/unigram.h"

namespace ditfleet::pipeline {

class T5Text final : public TextModel {
 public:
  T5Text(Unigram unigram, std::optional<Charsmap> charsmap)
      : unigram_(std::move(unigram)), charsmap_(std::move(charsmap)) {}
  std::string normalize(std::string_view text) const override {
    return charsmap_ ? charsmap_->normalize(text) : std::string(text);
  }
  Result<void> tokenize(std::string_view normalized, std::vector<std::int32_t>& ids) const override;
  std::optional<std::int32_t> id_of(std::string_view token) const override { return unigram_.id_of(token); }
  std::int32_t vocabulary_size() const override { return unigram_.size(); }

 private:
  Unigram unigram_;
  std::optional<Charsmap> charsmap_;
};

}  // namespace ditfleet::pipeline
