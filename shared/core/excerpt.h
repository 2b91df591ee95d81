// Quotes untrusted text in messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ditfleet {

// `text` as one line: control characters are escaped (\n, \x1b), so that the text cannot control a terminal or forge
// lines of a log. Thread-safe.
std::string escaped(std::string_view text);

// The first bytes of `text`, cut between characters and escaped; "?" if it is not UTF-8. Thread-safe.
std::string excerpt(std::string_view text, std::size_t max_bytes);

}  // namespace ditfleet
