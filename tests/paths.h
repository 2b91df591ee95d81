// Where the checkout and its build lie. Only paths.cpp is compiled with these paths, so that every checkout compiles
// the same test objects and ccache has them.
#pragma once

#include <string>

namespace ditfleet {

// A path of the checkout, or its root.
std::string source_path(const std::string& path = {});
// A program of the build: "ditfleet" or "ditfleet-worker".
std::string program_path(const std::string& name);
// A program or library that only tests use.
std::string test_program(const std::string& name);
std::string test_library(const std::string& name);

}  // namespace ditfleet
