// Ids sort by time, and within one millisecond in order of creation.
#include "shared/core/ids.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace ditfleet
