// What two builds that share a Redis rely on: a name and a build number that change with the Function library.
#include "shared/queue/library.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "shared/core/bytes.h"

namespace ditfleet::queue {
namespace {

// The lines that define the arguments of Functions and the forms of stored records.
std::string interface_lines() {
  std::istringstream text{std::string(library_text())};
  std::string out, line;
  while (std::getline(text, line)) {
    if (line.starts_with("register('") || line.find("_form = ") != std::string::npos) out += line + "\n";
  }
  return out;
}

TEST(QueueLibrary, AnotherInterfaceHasAnotherName) {
  EXPECT_EQ(std::string(kLibraryName) + " " + sha256_hex(interface_lines()),
            "ditfleet_v3 1ba78bc5657d7f48e1d674b212a72c48cdf6778ca0a7d2942ae34964375316df")
      << "the arguments of a Function or a stored record have changed: raise the version in kLibraryName, base.lua and "
         "register.lua unless it was raised since the last release, and update this test";
}

TEST(QueueLibrary, AnotherTextHasAnotherBuildNumber) {
  EXPECT_EQ(library_version(), "9 bd635a570bae1efb430cc481c5d904faa4010c410a40334c36aabc4187e37f1c")
      << "functions/*.lua has changed: raise the build number in shared/queue/CMakeLists.txt unless it was "
         "raised since the last release, and update this test";
}

}  // namespace
}  // namespace ditfleet::queue
