// Reads the fields of a SentencePiece model file (spiece.model) that T5 needs: pieces, their kinds, and the charsmap,
// which the library's API does not expose. Format: google/sentencepiece, sentencepiece_model.proto.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

struct SentencePieceModel {
  enum class Kind { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };
  struct Piece {
    std::string text;
    float score = 0;
    Kind kind = Kind::kNormal;
  };
  std::vector<Piece> pieces;
  std::string charsmap;  // empty: text is not normalized
};

// kDataCorrupt: not a protocol buffer, truncated, or without pieces.
Result<SentencePieceModel> parse_sentencepiece_model(std::string_view bytes);

}  // namespace ditfleet::pipeline
