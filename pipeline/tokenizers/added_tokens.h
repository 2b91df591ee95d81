// Tokens that are found in the text before the model sees it: "</s>", "<extra_id_0>", "<|endoftext|>".
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
  bool single_word = false;  // only where no word character touches it
  bool lstrip = false;       // takes white space before it
  bool rstrip = false;       // takes white space after it
  bool normalized = true;    // sought, normalized itself, in normalized text; otherwise in the text as it came
  bool special = false;
  bool operator==(const AddedToken&) const = default;
};

// Mutable while a tokenizer is loaded, then const: any thread may call the const members.
class AddedTokens {
 public:
  // Adds in order. A token that the model's vocabulary has keeps its id, others are numbered after it; the
  // same text again replaces what it meant. kDataCorrupt if two tokens become the same text by normalizing.
  Result<void> add(const std::vector<AddedToken>& tokens, const TextModel& model);
  // Special tokens in text are then text.
  void ignore_special(bool value) { ignore_special_ = value; }

  std::optional<std::int32_t> id_of(std::string_view content) const;

  struct Piece {
    std::string_view text;
    std::optional<std::int32_t> id;  // empty: ordinary text
  };
  // Splits the text into added tokens and what lies between them; empty pieces are left out. `normalized`
  // says which tokens to seek. The leftmost wins, of those the longest.
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
