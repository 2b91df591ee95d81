// Takes text apart. Thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

namespace ditfleet {

// The decimal number that the whole text is. Nothing for other text, and for numbers outside the inclusive bounds. The
// default bounds exclude infinity and NaN.
template <class Number>
std::optional<Number> number_of(std::string_view text, Number low = std::numeric_limits<Number>::lowest(),
                                Number high = std::numeric_limits<Number>::max()) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool valid = error == std::errc() && end == text.data() + text.size() && value >= low && value <= high;
  return valid ? std::optional(value) : std::nullopt;
}

// The integer at the beginning of the text; 0 if there is none.
template <class Int = std::int64_t>
Int leading_integer(std::string_view text) {
  Int value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

// Removes and returns the text before the separator. Without one, that is the whole text.
inline std::string_view take_part(std::string_view& text, char separator) {
  const std::string_view part = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(part.size() + 1, text.size()));
  return part;
}

// The text without the characters of `blank` at its ends.
inline std::string_view trimmed(std::string_view text, std::string_view blank = " \t") {
  const auto first = text.find_first_not_of(blank);
  return first == text.npos ? std::string_view() : text.substr(first, text.find_last_not_of(blank) - first + 1);
}

// The parts between the separators. A separator at the end is ignored.
inline std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) parts.push_back(take_part(text, separator));
  return parts;
}

// The first parts; empty ones if there are fewer.
template <std::size_t Count>
std::array<std::string_view, Count> first_parts(std::string_view text, char separator) {
  std::array<std::string_view, Count> parts;
  for (std::string_view& part : parts) part = take_part(text, separator);
  return parts;
}

}  // namespace ditfleet
