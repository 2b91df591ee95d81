// Converts text without added tokens to ids: a tokenizer's normalizer, pre-tokenizer and vocabulary.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

// Immutable and thread-safe. Text must be valid UTF-8.
class TextModel {
 public:
  virtual ~TextModel() = default;
  virtual std::string normalize(std::string_view text) const = 0;
  // Appends the ids of normalized text. kDataCorrupt: the text needs an unknown token and the vocabulary has none.
  virtual Result<void> tokenize(std::string_view normalized, std::vector<std::int32_t>& ids) const = 0;
  virtual std::optional<std::int32_t> id_of(std::string_view token) const = 0;
  virtual std::int32_t vocabulary_size() const = 0;
};

}  // namespace ditfleet::pipeline
