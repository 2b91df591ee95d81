// The Function library of functions/*.lua, embedded at build time.
#pragma once

#include <string>
#include <string_view>

namespace ditfleet::queue {

std::string_view library_text();
// SHA-256 of the text: what ditfleet_v1_version answers once `loadable_library()` is loaded.
const std::string& library_version();
// The text with its version Function added, for FUNCTION LOAD.
std::string loadable_library();

}  // namespace ditfleet::queue
