// What T5 needs of a SentencePiece model file (spiece.model): pieces, their kinds, and the charsmap. The
// library's own API does not give out the charsmap, so the few fields are read from the protocol buffer
// (google/sentencepiece, sentencepiece_model.proto).
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

// kDataCorrupt: not a protocol buffer, cut short, or no pieces.
Result<SentencePieceModel> parse_sentencepiece_model(std::string_view bytes);

}  // namespace ditfleet::pipeline
