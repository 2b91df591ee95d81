// Quotes untrusted text in messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ditfleet {

// The first bytes of `text`, cut between characters; "?" if it is not UTF-8. Control characters are escaped (\n, \x1b),
// so that the text cannot control a terminal. Thread safe.
std::string excerpt(std::string_view text, std::size_t max_bytes);

}  // namespace ditfleet
