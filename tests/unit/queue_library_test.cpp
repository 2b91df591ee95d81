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
            "ditfleet_v3 1600ac639fd84e3211eb749334170e75dc7fe7c379ebd585488906e2e894e8c5")
      << "the arguments of a Function or a stored record have changed: raise the version in kLibraryName, base.lua and "
         "register.lua unless it was raised since the last release, and update this test";
}

TEST(QueueLibrary, AnotherTextHasAnotherBuildNumber) {
  EXPECT_EQ(library_version(), "1 fa26d6cd8faf990a23f3751b55172682c25cab1299928959641e8a7a9ff44de2")
      << "functions/*.lua has changed: raise kLibraryBuild in library.h unless it was "
         "raised since the last release, and update this test";
}

}  // namespace
}  // namespace ditfleet::queue
