// A folder below /tmp that goes with the object that made it.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace ditfleet::testing {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    char name[] = "/tmp/ditfleet-test-XXXXXX";
    if (::mkdtemp(name) == nullptr) std::abort();
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all, ignored);
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// For tests that each want one.
class FolderTest : public ::testing::Test {
 private:
  const TemporaryFolder folder_;

 protected:
  const std::string& dir_ = folder_.path();
};

}  // namespace ditfleet::testing
