#include "pipeline/tokenizers/qwen_text.h"

#include <algorithm>

#include "pipeline/tokenizers/unicode.h"

namespace ditfleet::pipeline {
namespace {

using unicode::GeneralClass;
using unicode::run_end;

bool is_newline(char32_t c) { return c == '\r' || c == '\n'; }

// Bytes of the 's, 't, 're, 've, 'm, 'll or 'd that the text starts with, in any case; 0 if none.
std::size_t contraction(std::string_view text) {
  constexpr std::string_view kLong = "'\u017f";  // its upper case is S
  if (text.starts_with(kLong)) return kLong.size();
  for (const std::string_view wanted : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    const std::string_view start = text.substr(0, wanted.size());
    const auto is_same = [](char lower, char c) { return c == lower || (c >= 'A' && c <= 'Z' && (c | 0x20) == lower); };
    if (std::equal(wanted.begin(), wanted.end(), start.begin(), start.end(), is_same)) return wanted.size();
  }
  return 0;
}

// End of the word that begins at `at`, by the first matching alternative of
// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
// White space may be read three times, everything else once: it becomes at most three words.
std::size_t word_end(std::string_view text, std::size_t at) {
  if (const std::size_t bytes = contraction(text.substr(at))) return at + bytes;
  const auto [c, bytes] = unicode::decode(text, at);
  const GeneralClass own = unicode::general_class(c);
  if (own == GeneralClass::kNumber) return at + bytes;
  if (!is_newline(c)) {
    const std::size_t begin = own == GeneralClass::kLetter ? at : at + bytes;
    if (const std::size_t end = run_end(text, begin, GeneralClass::kLetter); end > begin) return end;
  }
  const std::size_t begin = c == ' ' ? at + bytes : at;
  if (std::size_t end = run_end(text, begin, GeneralClass::kOther); end > begin) {
    while (end < text.size() && is_newline(static_cast<unsigned char>(text[end]))) ++end;
    return end;
  }
  const std::size_t end = run_end(text, at, GeneralClass::kWhiteSpace);
  const std::size_t newline = text.substr(at, end - at).find_last_of("\r\n");
  if (newline != std::string_view::npos) return at + newline + 1;
  if (end == text.size()) return end;
  std::size_t last = end - 1;  // first byte of the last white space, which stays for the next word
  while ((static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
  return last > at ? last : end;
}

}  // namespace

std::string QwenText::normalize(std::string_view text) const { return unicode::nfc(text); }

Result<void> QwenText::tokenize(std::string_view text, std::vector<std::int32_t>& ids) const {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = word_end(text, at);
    if (auto done = encoder_.encode(text.substr(at, end - at), ids); !done) return done;
    at = end;
  }
  return {};
}

std::string qwen_chat(std::string_view prompt, bool thinking) {
  return "<|im_start|>user\n" + std::string(prompt) + "<|im_end|>\n<|im_start|>assistant\n" +
         (thinking ? "" : "<think>\n\n</think>\n\n");
}

}  // namespace ditfleet::pipeline
