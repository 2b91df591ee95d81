// Numbers in a request's path and query.
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>

#include "shared/core/error.h"
#include "shared/core/result.h"

namespace ditfleet::gateway {

// A whole number and nothing else.
inline std::optional<int> parse_number(std::string_view text) {
  int number = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (ec != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// ?limit= of a list whose pages hold `most` at most. `without` ends the message: what a list does without one.
// kInvalidArgument.
inline Result<int> parse_limit(std::string_view text, int most, const std::string& without = {}) {
  const auto number = parse_number(text);
  if (!number || *number < 1 || *number > most) {
    return invalid_argument("'limit' must be a whole number from 1 to " + std::to_string(most) + without, "limit");
  }
  return *number;
}

}  // namespace ditfleet::gateway
