#include "pipeline/tokenizers/clip_text.h"

#include <array>

#include "pipeline/tokenizers/unicode.h"

namespace ditfleet::pipeline {
namespace {

using unicode::GeneralClass;

constexpr std::array<std::string_view, 2> kMarks = {"<|startoftext|>", "<|endoftext|>"};
constexpr std::array<std::string_view, 7> kContractions = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};

// Length of the first word that the text starts with; 0 if none.
template <std::size_t kCount>
std::size_t starting(std::string_view text, const std::array<std::string_view, kCount>& words) {
  for (const std::string_view word : words) {
    if (text.starts_with(word)) return word.size();
  }
  return 0;
}

}  // namespace

std::string ClipText::normalize(std::string_view text) const {
  const std::string composed = unicode::nfc(text);
  std::string collapsed;
  collapsed.reserve(composed.size());
  for (std::size_t at = 0; at < composed.size();) {
    const auto [c, bytes] = unicode::decode(composed, at);
    if (unicode::general_class(c) == GeneralClass::kWhiteSpace) {
      collapsed.push_back(' ');
      at = unicode::run_end(composed, at, GeneralClass::kWhiteSpace);
    } else {
      collapsed.append(composed, at, bytes);
      at += bytes;
    }
  }
  return unicode::lower_case(collapsed);
}

// The words of <\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+
// (the first matching alternative), each split again by the pattern of byte-level pre-tokenizers. The second split
// changes only the two marks, which it splits at the borders of letters.
Result<void> ClipText::tokenize(std::string_view text, std::vector<std::int32_t>& ids) const {
  for (std::size_t at = 0; at < text.size();) {
    if (const std::size_t bytes = starting(text.substr(at), kMarks)) {
      constexpr std::size_t kBracket = 2;  // "<|" and "|>"
      const std::string_view mark = text.substr(at, bytes);
      for (const std::string_view part :
           {mark.substr(0, kBracket), mark.substr(kBracket, bytes - 2 * kBracket), mark.substr(bytes - kBracket)}) {
        if (auto done = encoder_.encode(part, ids); !done) return done;
      }
      at += bytes;
      continue;
    }
    const auto [c, bytes] = unicode::decode(text, at);
    const GeneralClass general = unicode::general_class(c);
    if (general == GeneralClass::kWhiteSpace) {
      at += bytes;
      continue;
    }
    std::size_t end = at + starting(text.substr(at), kContractions);
    if (end == at) end = general == GeneralClass::kNumber ? at + bytes : unicode::run_end(text, at, general);
    if (auto done = encoder_.encode(text.substr(at, end - at), ids); !done) return done;
    at = end;
  }
  return {};
}

}  // namespace ditfleet::pipeline
