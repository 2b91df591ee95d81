// The precompiled character map of a SentencePiece model, applied as in the `tokenizers` library. SentencePiece
// applies it differently (charsmap.cpp).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

// Immutable and thread-safe.
class Charsmap {
 public:
  // `blob`: u32 little-endian size of the trie in bytes, the trie (double array of u32 units, Darts-clone),
  // then replacements, each ended by a zero byte. kDataCorrupt: another format.
  static Result<Charsmap> parse(std::string_view blob);

  std::string normalize(std::string_view text) const;  // text: valid UTF-8

 private:
  // The replacement of the shortest prefix of `chunk` that has one.
  std::optional<std::string_view> replacement(std::string_view chunk) const;

  std::vector<std::uint32_t> units_;
  std::string replacements_;
};

}  // namespace ditfleet::pipeline
