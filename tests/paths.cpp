#include "tests/paths.h"

namespace ditfleet {

std::string source_path(const std::string& path) {
  return path.empty() ? DITFLEET_SOURCE_DIR : DITFLEET_SOURCE_DIR "/" + path;
}

std::string program_path(const std::string& name) { return DITFLEET_BIN_DIR "/" + name; }

std::string test_program(const std::string& name) { return std::string(DITFLEET_TESTS_DIR "/") + name; }
std::string test_library(const std::string& name) { return DITFLEET_TESTS_DIR "/lib" + name + ".so"; }

}  // namespace ditfleet
