// Byte-pair encoding over bytes, as CLIP ("</w>" at the end of a word) and Qwen have it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

// Immutable and thread-safe.
class BytePairEncoder {
 public:
  using Vocabulary = std::unordered_map<std::string, std::int32_t>;
  using Merges = std::vector<std::pair<std::string, std::string>>;  // best first

  // Vocabulary entries spell bytes as GPT-2 does (byte_spelling); `end_of_word` follows the last byte of a word and may
  // be empty. `unknown_token` replaces bytes that are not in the vocabulary; they are skipped if it is empty.
  // kDataCorrupt: a merge's parts or result are not in the vocabulary; the message contains the merge.
  static Result<BytePairEncoder> create(Vocabulary vocabulary, const Merges& merges, const std::string& unknown_token,
                                        const std::string& end_of_word);

  // Appends the ids of a non-empty word. kDataCorrupt: the vocabulary has neither the word's bytes nor the unknown
  // token.
  Result<void> encode(std::string_view word, std::vector<std::int32_t>& ids) const;
  std::optional<std::int32_t> id_of(std::string_view token) const;
  std::int32_t size() const { return static_cast<std::int32_t>(vocabulary_.size()); }

  // A byte as a printable character: '!' is "!", a space is "Ġ".
  static std::string byte_spelling(unsigned char byte);

 private:
  struct Merge {
    std::uint32_t rank = 0;
    std::int32_t id = 0;
  };
  const Merge* merge_of(std::int32_t left, std::int32_t right) const;

  Vocabulary vocabulary_;
  std::unordered_map<std::uint64_t, Merge> merges_;            // by left id << 32 | right id
  std::array<std::optional<std::int32_t>, 256> inner_, last_;  // a byte inside a word, and at its end
  std::string unknown_token_;
  std::optional<std::int32_t> unknown_id_;
};

}  // namespace ditfleet::pipeline
