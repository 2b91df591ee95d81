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
            "ditfleet_v3 cc5bd29143f80912b221ca60111274fee4dda55f2ab0e1bae8a291372c216d2c")
      << "the arguments of a Function or a stored record have changed: raise the version in kLibraryName, base.lua and "
         "register.lua unless it was raised since the last release, and update this test";
}

TEST(QueueLibrary, AnotherTextHasAnotherBuildNumber) {
  EXPECT_EQ(library_version(), "8 de5360233abe718841106374fb773604d098623b0012f0e09a434bda961db51c")
      << "functions/*.lua has changed: raise the build number in shared/queue/CMakeLists.txt unless it was "
         "raised since the last release, and update this test";
}

}  // namespace
}  // namespace ditfleet::queue
