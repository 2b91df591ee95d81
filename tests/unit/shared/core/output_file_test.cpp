// Output may go to any kind of file. A device or a pipe is written to and never replaced.
#include "shared/core/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "shared/core/bytes.h"

namespace ditfleet {
namespace {

namespace fs = std::filesystem;

class OutputFile : public ::testing::Test {
 protected:
  OutputFile() { fs::create_directories(dir_); }
  ~OutputFile() override { fs::remove_all(dir_); }
  std::string path(const char* name) const { return (dir_ / name).string(); }

  const fs::path dir_ = fs::temp_directory_path() / ("ditfleet_output_file_" + std::to_string(::getpid()));
};

TEST_F(OutputFile, APipeReceivesTheBytes) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  const int reader = ::open(path("pipe").c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);  // does not block
  ASSERT_GE(reader, 0);
  EXPECT_TRUE(write_output_file(path("pipe"), "picture").ok());
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  std::string got(16, '\0');
  const ssize_t bytes = ::read(reader, got.data(), got.size());
  ::close(reader);
  ASSERT_EQ(bytes, 7);
  EXPECT_EQ(got.substr(0, 7), "picture");
}

TEST_F(OutputFile, ADeviceIsNotReplacedEvenThroughALink) {
  fs::create_symlink("/dev/null", path("null"));
  EXPECT_TRUE(write_output_file(path("null"), "picture").ok());
  EXPECT_TRUE(fs::is_symlink(path("null")));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  fs::create_symlink("/dev/full", path("full"));
  const auto full = write_output_file(path("full"), "picture");
  ASSERT_FALSE(full.ok());
  EXPECT_NE(full.error().message.find("full': No space left"), std::string::npos) << full.error().message;
}

TEST_F(OutputFile, ALinksTargetReceivesTheBytes) {
  ASSERT_TRUE(write_output_file(path("target"), "old").ok());
  fs::create_symlink("target", path("link"));
  ASSERT_TRUE(write_output_file(path("link"), "new").ok());
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(*read_file(path("target")), "new");
}

TEST_F(OutputFile, OtherFilesAreReplacedAndFoldersAreNot) {
  ASSERT_TRUE(write_output_file(path("file"), "old").ok());
  ASSERT_TRUE(write_output_file(path("file"), "new").ok());
  EXPECT_EQ(*read_file(path("file")), "new");
  fs::permissions(path("file"), fs::perms(0640));
  ASSERT_TRUE(write_output_file(path("file"), "newer", /*keep_mode=*/true).ok());
  EXPECT_EQ(fs::status(path("file")).permissions(), fs::perms(0640));
  fs::create_directories(path("folder"));
  EXPECT_FALSE(write_output_file(path("folder"), "x").ok());
  EXPECT_FALSE(write_output_file(path("nowhere/file"), "x").ok());
}

}  // namespace
}  // namespace ditfleet
