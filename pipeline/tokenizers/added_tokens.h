// Tokens that are matched in the text before the model runs: "</s>", "<extra_id_0>", "<|endoftext|>".
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pipeline/tokenizers/text_model.h"

namespace ditfleet::pipeline {

struct AddedToken {
  std::string content;
  bool single_word = false;  // matches only between non-word characters
  bool lstrip = false;       // includes white space before it
  bool rstrip = false;       // includes white space after it
  bool normalized = true;  // true: matched in normalized text, after normalization of the token; false: in the original
  bool special = false;
  bool operator==(const AddedToken&) const = default;
};

// Modified only while a tokenizer is loaded; const members are thread-safe.
class AddedTokens {
 public:
  // Adds tokens in order. Tokens in the model's vocabulary keep their ids, others are numbered after it. A token
  // replaces an earlier one with the same text. kDataCorrupt: two different texts are equal once normalized.
  Result<void> add(const std::vector<AddedToken>& tokens, const TextModel& model);
  // Treats special tokens in the text as plain text.
  void ignore_special(bool value) { ignore_special_ = value; }

  std::optional<std::int32_t> id_of(std::string_view content) const;

  struct Piece {
    std::string_view text;
    std::optional<std::int32_t> id;  // empty: plain text
  };
  // Splits the text into added tokens and the text between them, without empty pieces. `normalized` selects the tokens
  // to match. The leftmost match wins, then the longest.
  std::vector<Piece> split(std::string_view text, bool normalized) const;

 private:
  // Patterns by their first byte, longest first.
  using Patterns = std::map<unsigned char, std::vector<std::pair<std::string, std::int32_t>>>;

  std::map<std::string, std::int32_t, std::less<>> id_of_;
  std::map<std::int32_t, AddedToken> token_of_;
  std::set<std::string> special_;
  Patterns raw_, normalized_;
  bool ignore_special_ = false;
};

}  // namespace ditfleet::pipeline
