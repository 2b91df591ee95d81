// Work on clients' bytes, on other threads than the caller's.
#include "coordinator/gateway/routes/off_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

namespace ditfleet::gateway {
namespace {

using ::testing::HasSubstr;
using Work = std::function<Result<int>()>;

constexpr auto kLarge = static_cast<std::size_t>(OffLoop::kSmall) + 1;

using Outcome = std::optional<Result<int>>;

// Asio needs results that have a default.
asio::awaitable<Outcome> optional(asio::awaitable<Result<int>> work) { co_return co_await std::move(work); }

struct OffLoopTest : testing::Test {
  // Starts the work. `io` must run to get its result.
  std::shared_ptr<Outcome> start(const std::string& tenant, std::size_t bytes, Work work) {
    auto result = std::make_shared<Outcome>();
    asio::co_spawn(io, optional(threads.run<int>(tenant, bytes, std::move(work))),
                   [result](const std::exception_ptr& thrown, Outcome got) {
                     *result = thrown ? internal_error("thrown") : std::move(got);
                   });
    return result;
  }
  Result<int> wait(const std::shared_ptr<Outcome>& result) {
    while (!*result && io.run_one() > 0) {
    }
    return **result;
  }

  asio::io_context io;
  const asio::executor_work_guard<asio::io_context::executor_type> waits{io.get_executor()};  // run_one() blocks
  OffLoop threads;
};

TEST_F(OffLoopTest, OnlyLargeWorkLeavesTheThread) {
  std::thread::id small, large;
  EXPECT_EQ(*wait(start("a", 100, [&] { return small = std::this_thread::get_id(), 1; })), 1);
  EXPECT_EQ(*wait(start("a", kLarge, [&] { return large = std::this_thread::get_id(), 2; })), 2);
  EXPECT_EQ(small, std::this_thread::get_id());
  EXPECT_NE(large, std::this_thread::get_id());
}

TEST_F(OffLoopTest, ErrorsAndExceptionsAreReturned) {
  EXPECT_EQ(wait(start("a", kLarge, [] { return invalid_argument("bad"); })).error().message, "bad");
  const auto thrown = wait(start("a", kLarge, []() -> Result<int> { throw std::runtime_error("broken"); }));
  EXPECT_EQ(thrown.error().code, Code::kInternal);
  EXPECT_THAT(thrown.error().message, HasSubstr("broken"));
}

TEST_F(OffLoopTest, ATenantUsesOneThreadAndItsShare) {
  std::promise<void> release;
  const auto released = release.get_future().share();
  const Work slow = [released] { return released.wait(), 1; };
  const auto share = static_cast<std::size_t>(OffLoop::kShare);
  const auto first = start("a", share - kLarge, slow), second = start("a", kLarge, [] { return 2; });
  const auto beyond = wait(start("a", kLarge, [] { return 3; }));
  EXPECT_EQ(beyond.error().code, Code::kResourceExhausted);
  EXPECT_THAT(beyond.error().message, HasSubstr("tenant 'a' has 67108864 bytes of requests that wait to be read"));
  EXPECT_GT(beyond.error().retry_after.count(), 0);
  // Another tenant's work ends while the first one's thread is busy.
  EXPECT_EQ(*wait(start("b", kLarge, [] { return 4; })), 4);
  EXPECT_FALSE(*first);
  EXPECT_FALSE(*second);
  release.set_value();
  EXPECT_EQ(*wait(first), 1);
  EXPECT_EQ(*wait(second), 2);
  EXPECT_EQ(*wait(start("a", 2 * share, [] { return 5; })), 5) << "a single one may have any size";
}

TEST_F(OffLoopTest, AllTenantsTogetherHaveALimit) {
  std::promise<void> release;
  const auto released = release.get_future().share();
  std::vector<std::shared_ptr<Outcome>> slow;
  for (const char* tenant : {"a", "b", "c", "d"})
    slow.push_back(start(tenant, static_cast<std::size_t>(OffLoop::kShare), [released] { return released.wait(), 1; }));
  const auto beyond = wait(start("e", kLarge, [] { return 2; }));
  EXPECT_EQ(beyond.error().code, Code::kUnavailable);
  EXPECT_GT(beyond.error().retry_after.count(), 0);
  release.set_value();
  for (const auto& one : slow) EXPECT_EQ(*wait(one), 1);
  EXPECT_EQ(*wait(start("e", kLarge, [] { return 3; })), 3);
}

// A stopped caller leaves work behind, which owns what it uses.
TEST(OffLoop, EndsWithWorkThatNobodyWaitsFor) {
  asio::io_context io;
  bool done = false;
  {
    OffLoop threads;
    asio::co_spawn(io, optional(threads.run<int>("a", kLarge, [&] { return done = true, 1; })),
                   [](const std::exception_ptr&, Outcome) {});
    io.run_one();
  }
  EXPECT_TRUE(done);
}

}  // namespace
}  // namespace ditfleet::gateway
