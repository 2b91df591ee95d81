// The Function library of functions/*.lua, embedded at build time.
#pragma once

#include <string>
#include <string_view>

namespace ditfleet::queue {

// The library's name, and before an underscore the beginning of its Functions' names. The number in it changes with
// the arguments or replies of a Function and with the stored forms: processes of two builds may share a Redis.
inline constexpr std::string_view kLibraryName = "ditfleet_v2";

std::string_view library_text();
// SHA-256 of the text, which the Function <kLibraryName>_version returns. A Redis that has another text loads ours.
const std::string& library_version();
// The text with its version Function added, for FUNCTION LOAD.
std::string loadable_library();

}  // namespace ditfleet::queue
