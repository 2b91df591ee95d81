#include "shared/core/file_lock.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

namespace ditfleet {
namespace {

namespace fs = std::filesystem;

struct FileLocks : testing::Test {
  FileLocks() : path(testing::TempDir() + "ditfleet-lock-" + std::to_string(::getpid())) {}
  ~FileLocks() override { fs::remove(path); }
  const std::string path;
};

TEST_F(FileLocks, ALockHasOneHolderAndEndsWithItsObject) {
  auto first = FileLock::try_take(path);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(FileLock::try_take(path).error().code, Code::kConflict);
  { const FileLock moved = std::move(*first); }
  EXPECT_FALSE(first->held());
  EXPECT_TRUE(FileLock::try_take(path).ok());
  EXPECT_TRUE(fs::exists(path));
}

TEST_F(FileLocks, ALockRemovesItsFileIfAsked) {
  {
    const auto lock = FileLock::try_take(path, FileLock::AtEnd::kRemoveFile);
    ASSERT_TRUE(lock.ok());
    EXPECT_TRUE(fs::exists(path));
  }
  EXPECT_FALSE(fs::exists(path));
}

TEST_F(FileLocks, AFileThatCannotBeOpenedIsAnError) {
  const auto lock = FileLock::try_take("/nowhere/lock");
  ASSERT_FALSE(lock.ok());
  EXPECT_EQ(lock.error().code, Code::kUnavailable);
  EXPECT_EQ(lock.error().message, "cannot open '/nowhere/lock': No such file or directory");
}

}  // namespace
}  // namespace ditfleet
