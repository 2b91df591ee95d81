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
            "ditfleet_v3 77816009c1af7a628981bf9eb171bf8f36c27c8a912ca4355fdf36edf1a5e0c4")
      << "the arguments of a Function or a stored record have changed: raise the version in kLibraryName, base.lua and "
         "register.lua unless it was raised since the last release, and update this test";
}

TEST(QueueLibrary, AnotherTextHasAnotherBuildNumber) {
  EXPECT_EQ(library_version(), "1 f4c79e2b55dae80ba87b9b6592937fac28f384f1b09fbebf7da483e2648049f7")
      << "functions/*.lua has changed: raise kLibraryBuild in library.h unless it was "
         "raised since the last release, and update this test";
}

}  // namespace
}  // namespace ditfleet::queue
