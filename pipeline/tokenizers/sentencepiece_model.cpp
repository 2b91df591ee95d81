#include "pipeline/tokenizers/sentencepiece_model.h"

#include <cstring>
#include <optional>

#include "shared/core/bytes.h"

namespace ditfleet::pipeline {
namespace {

// One field of a message in protocol buffers' wire format.
struct Field {
  std::uint32_t number = 0;
  std::uint64_t varint = 0;  // wire type 0; the bits of types 1 and 5
  std::string_view bytes;    // wire type 2
  bool is_bytes = false;
};

class MessageReader {
 public:
  explicit MessageReader(std::string_view bytes) : rest_(bytes) {}

  // Empty at the end and on malformed input; failed() distinguishes the two.
  std::optional<Field> next() {
    if (rest_.empty() || failed_) return std::nullopt;
    Field field;
    const std::uint64_t tag = varint();
    field.number = static_cast<std::uint32_t>(tag >> 3);
    switch (tag & 7) {
      case 0: field.varint = varint(); break;
      case 1: field.varint = fixed(8); break;
      case 2: {
        const std::uint64_t size = varint();
        if (size > rest_.size()) failed_ = true;
        if (failed_) break;
        field.bytes = rest_.substr(0, size);
        field.is_bytes = true;
        rest_.remove_prefix(size);
        break;
      }
      case 5: field.varint = fixed(4); break;
      default: failed_ = true;
    }
    if (failed_ || field.number == 0) {
      failed_ = true;
      return std::nullopt;
    }
    return field;
  }
  bool failed() const { return failed_; }

 private:
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (rest_.empty()) break;
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      value |= std::uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    failed_ = true;
    return 0;
  }
  std::uint64_t fixed(std::size_t size) {
    if (size > rest_.size()) {
      failed_ = true;
      return 0;
    }
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < size; ++i) value |= std::uint64_t{static_cast<unsigned char>(rest_[i])} << (8 * i);
    rest_.remove_prefix(size);
    return value;
  }

  std::string_view rest_;
  bool failed_ = false;
};

Error corrupt(const std::string& what) { return Error{Code::kDataCorrupt, what}; }

// SentencePiece: piece = 1, score = 2, type = 3.
Result<SentencePieceModel::Piece> parse_piece(std::string_view bytes) {
  SentencePieceModel::Piece piece;
  MessageReader reader(bytes);
  while (const auto field = reader.next()) {
    if (field->number == 1 && field->is_bytes) {
      piece.text = field->bytes;
    } else if (field->number == 2) {
      const auto bits = static_cast<std::uint32_t>(field->varint);
      std::memcpy(&piece.score, &bits, sizeof bits);
    } else if (field->number == 3) {
      if (field->varint < 1 || field->varint > 6)
        return corrupt("a piece has the unknown type " + std::to_string(field->varint));
      piece.kind = static_cast<SentencePieceModel::Kind>(field->varint);
    }
  }
  if (reader.failed()) return corrupt("a piece is broken");
  if (!is_valid_utf8(piece.text)) return corrupt("a piece is not UTF-8");
  return piece;
}

}  // namespace

Result<SentencePieceModel> parse_sentencepiece_model(std::string_view bytes) {
  SentencePieceModel model;
  bool has_trainer = false;
  MessageReader reader(bytes);  // ModelProto: pieces = 1, trainer_spec = 2, normalizer_spec = 3
  while (const auto field = reader.next()) {
    if (!field->is_bytes) continue;
    if (field->number == 1) {
      auto piece = parse_piece(field->bytes);
      if (!piece) return corrupt("piece " + std::to_string(model.pieces.size()) + ": " + piece.error().message);
      model.pieces.push_back(std::move(*piece));
    } else if (field->number ==
               2) {  // TrainerSpec; transformers ignores its model type and always builds a unigram model
      has_trainer = true;
      MessageReader trainer(field->bytes);
      while (trainer.next()) {
      }
      if (trainer.failed()) return corrupt("its trainer_spec is broken");
    } else if (field->number == 3) {  // NormalizerSpec: precompiled_charsmap = 2
      MessageReader normalizer(field->bytes);
      while (const auto inner = normalizer.next()) {
        if (inner->number == 2 && inner->is_bytes) model.charsmap = inner->bytes;
      }
      if (normalizer.failed()) return corrupt("its normalizer_spec is broken");
    }
  }
  if (reader.failed()) return corrupt("it is not a SentencePiece model, or is truncated");
  if (model.pieces.empty()) return corrupt("it has no pieces");
  if (!has_trainer) return corrupt("it has no trainer_spec (is it truncated?)");
  return model;
}

}  // namespace ditfleet::pipeline
