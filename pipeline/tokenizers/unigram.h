// The unigram language model: splits a word into vocabulary pieces with the best total score (Viterbi).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

// Immutable and thread-safe.
class Unigram {
 public:
  struct Piece {
    std::string text;
    double score = 0;  // log probability
  };
  // The id of a piece is its position. If two pieces have the same text, the last one is used. kDataCorrupt:
  // `unknown_id` is out of range.
  static Result<Unigram> create(std::vector<Piece> pieces, std::int32_t unknown_id);

  // Appends the ids of a word (valid UTF-8). Characters that no piece covers are unknown; adjacent unknown characters
  // become one unknown token.
  void encode(std::string_view word, std::vector<std::int32_t>& ids) const;
  std::optional<std::int32_t> id_of(std::string_view text) const;
  std::int32_t size() const { return static_cast<std::int32_t>(pieces_.size()); }

 private:
  struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  std::vector<Piece> pieces_;
  std::unordered_map<std::string, std::int32_t, TextHash, std::equal_to<>> id_of_;
  // A byte trie: the child of node n by byte b is children_[n << 8 | b].
  std::unordered_map<std::uint64_t, std::uint32_t> children_;
  std::vector<std::int32_t> ends_;  // of each node: the piece that ends there, or -1
  std::int32_t unknown_id_ = 0;
  double unknown_score_ = 0;
};

}  // namespace ditfleet::pipeline
