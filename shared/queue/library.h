// The Function library of functions/*.lua, embedded at build time.
#pragma once

#include <string>
#include <string_view>

namespace ditfleet::queue {

// The library's name, followed by "_" in the names of its Functions. The version in it changes with the arguments and
// replies of Functions, so that processes of two builds can share a Redis.
inline constexpr std::string_view kLibraryName = "ditfleet_v3";

// The text and its build number, which CMakeLists.txt raises with every change of functions/*.lua. Texts with the same
// name are compatible: a process keeps a text with a higher build number than its own.
std::string_view library_text();
int library_build();
// "<build> <SHA-256 of the text>". The Function <kLibraryName>_version returns the version that Redis has loaded.
const std::string& library_version();
// The text with its version Function added, for FUNCTION LOAD.
std::string loadable_library();
std::string loadable_library(std::string_view text, const std::string& version);  // the same of another build

}  // namespace ditfleet::queue
