// The main program of every GoogleTest binary. DITFLEET_SKIPS names a file to which it appends a line for each skipped
// test, "NAME: reason": CTest sees only a program that passed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace {

class SkipWriter : public ::testing::EmptyTestEventListener {
 public:
  explicit SkipWriter(const char* path) : out_(path, std::ios::app) {}

 private:
  void OnTestEnd(const ::testing::TestInfo& test) override {
    const ::testing::TestResult& result = *test.result();
    for (int i = 0; result.Skipped() && i < result.total_part_count(); ++i) {
      std::string reason = result.GetTestPartResult(i).message();
      std::replace(reason.begin(), reason.end(), '\n', ' ');
      out_ << test.test_suite_name() << '.' << test.name() << ": " << reason << std::endl;
    }
  }

  std::ofstream out_;
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  if (const char* path = std::getenv("DITFLEET_SKIPS"))
    ::testing::UnitTest::GetInstance()->listeners().Append(new SkipWriter(path));  // GoogleTest deletes it
  // testing::TempDir() is this process's own: CTest runs some binaries twice at the same time.
  std::string folder = ::testing::TempDir() + "ditfleet-test-XXXXXX";
  if (std::getenv("TEST_TMPDIR") || !::mkdtemp(folder.data())) return RUN_ALL_TESTS();
  ::setenv("TEST_TMPDIR", folder.c_str(), 1);
  const int status = RUN_ALL_TESTS();
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return status;
}
