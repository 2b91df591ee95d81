// Unicode functions for tokenizers, based on ICU. They compute the same results as the `tokenizers` library. Text must
// be valid UTF-8. All functions are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace ditfleet::pipeline::unicode {

enum class GeneralClass : std::uint8_t { kOther, kLetter, kNumber, kWhiteSpace };

struct Decoded {
  char32_t code_point = 0;
  std::size_t bytes = 0;
};
Decoded decode(std::string_view text, std::size_t at);  // at: the first byte of a character
void append(std::string& text, char32_t code_point);

GeneralClass general_class(char32_t code_point);
// End of the run of characters of one class that begins at `at`; `at` if there is none.
std::size_t run_end(std::string_view text, std::size_t at, GeneralClass wanted);
bool is_word_character(char32_t code_point);  // \w of Rust's regex crate

// Character by character, without the rule for a final sigma.
std::string lower_case(std::string_view text);
// Canonical composition of Unicode 9. Characters of later versions are neither composed nor reordered.
std::string nfc(std::string_view text);
// Calls `use` with each extended grapheme cluster (UAX 29) of the text, in order.
void for_each_cluster(std::string_view text, const std::function<void(std::string_view)>& use);

}  // namespace ditfleet::pipeline::unicode
