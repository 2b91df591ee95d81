// Files that contain secrets, and passwords on the command line.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "shared/core/bytes.h"
#include "shared/core/secrets.h"

namespace ditfleet {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(SecretFile, MustBelongToItsReaderAlone) {
  char name[] = "/tmp/ditfleet-secret-XXXXXX";
  const std::string folder = ::mkdtemp(name), file = folder + "/key";
  ASSERT_TRUE(write_file_atomically(file, "0123456789abcdef\n").ok());
  for (const mode_t mode : {0600u, 0400u}) {
    ASSERT_EQ(::chmod(file.c_str(), mode), 0);
    EXPECT_EQ(*read_secret_file(file), "0123456789abcdef\n");
  }
  for (const mode_t mode : {0644u, 0640u, 0620u, 0601u}) {
    ASSERT_EQ(::chmod(file.c_str(), mode), 0);
    const auto text = read_secret_file(file);
    ASSERT_FALSE(text.ok()) << mode;
    EXPECT_EQ(text.error().code, Code::kInvalidArgument);
    EXPECT_THAT(text.error().message, AllOf(HasSubstr("chmod 600 " + file), HasSubstr(std::to_string(mode / 64))));
  }
  ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(file.c_str(), 65534, 65534), 0);
    const auto text = read_secret_file(file);
    ASSERT_FALSE(text.ok());
    EXPECT_THAT(text.error().message, AllOf(HasSubstr(file), HasSubstr("65534")));
  }
  EXPECT_EQ(read_secret_file(folder + "/none").error().code, Code::kNotFound);
  std::filesystem::remove_all(folder);
}

TEST(HidePasswords, OverwritesThoseInUrls) {
  const auto hidden = [](std::string argument) {
    char* argv[] = {argument.data()};
    hide_passwords(1, argv);
    return argument;
  };
  EXPECT_EQ(hidden("redis.url=redis://me:s3cret@host:6379/0"), "redis.url=redis://me:******@host:6379/0");
  EXPECT_EQ(hidden("--redis=rediss://:a@b:c@host"), "--redis=rediss://:*****@host");
  EXPECT_EQ(hidden("unix://:pw@/run/redis.sock?db=1"), "unix://:**@/run/redis.sock?db=1");
  for (const char* same : {"", "redis://host:6379", "redis://me@host:1", "a:b@c", "http://h:1/x"})
    EXPECT_EQ(hidden(same), same);
}

}  // namespace
}  // namespace ditfleet
