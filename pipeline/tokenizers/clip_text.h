// CLIP's text model: applies NFC, collapses white space to single spaces, converts to lower case, splits words by
// CLIP's pattern and encodes them as byte pairs.
#pragma once

#include "pipeline/tokenizers/byte_pair.h"
#include "pipeline/tokenizers/text_model.h"

namespace ditfleet::pipeline {

class ClipText final : public TextModel {
 public:
  explicit ClipText(BytePairEncoder encoder) : encoder_(std::move(encoder)) {}
  std::string normalize(std::string_view text) const override;
  Result<void> tokenize(std::string_view normalized, std::vector<std::int32_t>& ids) const override;
  std::optional<std::int32_t> id_of(std::string_view token) const override { return encoder_.id_of(token); }
  std::int32_t vocabulary_size() const override { return encoder_.size(); }

 private:
  BytePairEncoder encoder_;
};

}  // namespace ditfleet::pipeline
