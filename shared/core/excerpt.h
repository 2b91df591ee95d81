// What a message may repeat of foreign text.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ditfleet {

// The first bytes of `text`, cut between characters; "?" if it is not UTF-8. Control characters are written out (\n,
// \x1b): a message may end on a terminal, and a file's names must not drive that. Thread safe.
std::string excerpt(std::string_view text, std::size_t max_bytes);

}  // namespace ditfleet
