// Ids sort by time, and within one millisecond in order of creation.
#include "shared/core/ids.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

namespace ditfleet {
namespace {

TEST(Ids, SortInOrderOfCreation) {
  std::string before;
  int same_millisecond = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::string id = new_id();
    ASSERT_EQ(id.size(), 26u);
    ASSERT_TRUE(is_valid_id(id)) << id;
    ASSERT_LT(before, id);
    same_millisecond += !before.empty() && before.compare(0, 10, id, 0, 10) == 0;
    before = id;
  }
  EXPECT_GT(same_millisecond, 0);
}

// An id cannot be guessed from its predecessor: at least the whole lower half changes.
TEST(Ids, AreUnpredictable) {
  std::set<std::string> ends;
  for (int i = 0; i < 1'000; ++i) ends.insert(new_id().substr(20));
  EXPECT_GT(ends.size(), 990u);
}

TEST(Ids, AreUniqueAmongThreads) {
  std::vector<std::vector<std::string>> made(4);
  std::vector<std::thread> threads;
  for (auto& own : made)
    threads.emplace_back([&own] {
      for (int i = 0; i < 5'000; ++i) own.push_back(new_id());
    });
  for (auto& thread : threads) thread.join();
  std::set<std::string> all;
  for (const auto& own : made) all.insert(own.begin(), own.end());
  EXPECT_EQ(all.size(), 20'000u);
}

TEST(Ids, AreNotThoseOfTheProcessItWasForkedFrom) {
  EXPECT_NE(new_nonce(), new_nonce());  // so that random bytes are left over
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string nonce = new_nonce();
    ::_exit(::write(pipe[1], nonce.data(), nonce.size()) == static_cast<ssize_t>(nonce.size()) ? 0 : 1);
  }
  const std::string here = new_nonce();
  std::string there(here.size(), '\0');
  EXPECT_EQ(::read(pipe[0], there.data(), there.size()), static_cast<ssize_t>(there.size()));
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_NE(here, there);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

}  // namespace
}  // namespace ditfleet
