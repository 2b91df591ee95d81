#include "shared/core/background_threads.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace ditfleet {
namespace {

TEST(BackgroundThreads, ReturnsValuesAndRethrowsExceptions) {
  BackgroundThreads threads("values", 2);
  auto value = threads.run([] { return 7; });
  auto failure = threads.run([]() -> int { throw std::runtime_error("no"); });
  EXPECT_EQ(value.get(), 7);
  EXPECT_THROW(failure.get(), std::runtime_error);
}

TEST(BackgroundThreads, RunsAtMostSoManyTasksAtOnce) {
  std::atomic<int> running = 0, most = 0;
  {
    BackgroundThreads threads("bounded", 2);
    for (int i = 0; i < 20; ++i)
      threads.run([&] {
        const int now = ++running;
        most = std::max(most.load(), now);
        std::this_thread::yield();
        --running;
      });
  }
  EXPECT_LE(most, 2);
}

TEST(BackgroundThreads, WorkOfTwoThreadsOverlaps) {
  BackgroundThreads threads("overlap", 2);
  std::promise<void> first, second;
  auto one = threads.run([&] { first.set_value(), second.get_future().wait(); });
  auto two = threads.run([&] { second.set_value(), first.get_future().wait(); });
  one.get(), two.get();
}

TEST(BackgroundThreads, FinishesItsWorkBeforeItIsDestroyed) {
  std::atomic<int> done = 0;
  {
    BackgroundThreads threads("ending", 1);
    for (int i = 0; i < 50; ++i) threads.run([&] { ++done; });
  }
  EXPECT_EQ(done, 50);
}

TEST(BackgroundThreads, ThreadsHaveTheName) {
  BackgroundThreads threads("a-name-longer-than-fifteen", 1);
  const auto name = threads
                        .run([] {
                          char text[16] = {};
                          ::pthread_getname_np(::pthread_self(), text, sizeof text);
                          return std::string(text);
                        })
                        .get();
  EXPECT_EQ(name, "a-name-longer-t");
}

}  // namespace
}  // namespace ditfleet
