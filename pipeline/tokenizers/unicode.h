// The text functions that tokenizers are made of, each as the `tokenizers` library does it. Text is valid
// UTF-8 (check before). All functions are thread safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "pipeline/tokenizers/unicode_tables.h"

namespace ditfleet::pipeline::unicode {

struct Decoded {
  char32_t code_point = 0;
  std::size_t bytes = 0;
};
Decoded decode(std::string_view text, std::size_t at);  // at: the first byte of a character
void append(std::string& text, char32_t code_point);

GeneralClass general_class(char32_t code_point);
bool is_word_character(char32_t code_point);  // \w of Rust's regex crate

// Character by character, without the rule for a final sigma.
std::string lower_case(std::string_view text);
// Canonical composition by Unicode 9: characters that came later neither compose nor are reordered.
std::string nfc(std::string_view text);
// Length in bytes of the extended grapheme cluster (UAX 29) that begins at `at`.
std::size_t cluster_bytes(std::string_view text, std::size_t at);

}  // namespace ditfleet::pipeline::unicode
