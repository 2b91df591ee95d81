// Makes untrusted text safe for messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ditfleet {

// Escapes control characters (\n, \x1b), so that the text cannot control a terminal or forge log lines. Thread-safe.
std::string escaped(std::string_view text);

// Shortens `text` to `max_bytes` at a character boundary and escapes it. "?" if it is not UTF-8. Thread-safe.
std::string excerpt(std::string_view text, std::size_t max_bytes);

}  // namespace ditfleet
