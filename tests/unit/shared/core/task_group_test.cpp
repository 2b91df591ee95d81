// Tasks end with their group, in any order.
#include "shared/core/task_group.h"

#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <memory>
#include <stdexcept>
#include <vector>

namespace ditfleet {
namespace {

asio::awaitable<void> sleep_on(asio::steady_timer& timer, bool& ended) {
  boost::system::error_code ignored;
  co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  ended = true;
}

TEST(TaskGroup, StopEndsAWaitingTask) {
  asio::io_context io;
  asio::steady_timer timer(io, asio::steady_timer::time_point::max());
  TaskGroup group(io.get_executor());
  bool ended = false;
  group.spawn("sleeper", sleep_on(timer, ended));
  io.poll();
  EXPECT_EQ(group.running(), 1u);
  group.stop();
  io.run();
  EXPECT_EQ(group.running(), 0u);
}

// A stop from outside the executor is queued. Here the task ends before the queued stop runs, which must not use freed
// memory (the address sanitizer detects it reliably).
TEST(TaskGroup, ATaskMayEndBeforeAQueuedStop) {
  asio::io_context io;
  auto group = std::make_unique<TaskGroup>(io.get_executor());
  constexpr int kTasks = 100;
  std::vector<std::unique_ptr<asio::steady_timer>> timers;
  bool ended[kTasks] = {};
  for (int i = 0; i < kTasks; ++i) {
    timers.push_back(std::make_unique<asio::steady_timer>(io, asio::steady_timer::time_point::max()));
    group->spawn("sleeper", sleep_on(*timers.back(), ended[i]));
  }
  io.poll();
  for (auto& timer : timers) timer->cancel();  // queued; ends the tasks
  group->stop();                               // queued after it
  group.reset();
  io.restart();
  io.run();
  for (bool one : ended) EXPECT_TRUE(one);
}

TEST(TaskGroup, JoinWaitsForAllEvenIfOneThrows) {
  asio::io_context io;
  TaskGroup group(io.get_executor());
  asio::steady_timer timer(io, std::chrono::milliseconds(1));
  bool ended = false, joined = false;
  group.spawn("sleeper", sleep_on(timer, ended));
  group.spawn("thrower", []() -> asio::awaitable<void> {
    throw std::runtime_error("on purpose");
    co_return;
  }());
  TaskGroup outer(io.get_executor());
  outer.spawn("joiner", [](TaskGroup& inner, bool& done) -> asio::awaitable<void> {
    co_await inner.join();
    done = true;
  }(group, joined));
  io.run();
  EXPECT_TRUE(ended);
  EXPECT_TRUE(joined);
  bool late = false;
  group.stop();
  group.spawn("late", sleep_on(timer, late));
  io.restart();
  io.run();
  EXPECT_FALSE(late);
}

asio::awaitable<void> fail_on(bool& fails) {
  if (fails) throw std::runtime_error("on purpose");
  co_return;
}

void run_task(bool fails, Vital vital) {
  asio::io_context io;
  TaskGroup group(io.get_executor());
  group.spawn("loop", fail_on(fails), vital);
  io.run();
}

TEST(TaskGroup, AVitalTaskThatEndsEndsTheProcess) {
  const auto status = testing::ExitedWithCode(kExitVitalTask);
  EXPECT_EXIT(run_task(true, Vital::kForever), status, "");
  EXPECT_EXIT(run_task(false, Vital::kForever), status, "");
  EXPECT_EXIT(run_task(true, Vital::kOnce), status, "");
  run_task(false, Vital::kOnce);
  run_task(true, Vital::kNo);
}

TEST(TaskGroup, AStoppedGroupMayEndItsVitalTasks) {
  asio::io_context io;
  asio::steady_timer timer(io, asio::steady_timer::time_point::max());
  TaskGroup group(io.get_executor());
  bool ended = false;
  group.spawn("sleeper", sleep_on(timer, ended), Vital::kForever);
  group.spawn(
      "waiter",
      [](asio::steady_timer& t) -> asio::awaitable<void> { co_await t.async_wait(asio::use_awaitable); }(timer),
      Vital::kForever);
  io.poll();
  group.stop();
  io.run();
  EXPECT_EQ(group.running(), 0u);
}

}  // namespace
}  // namespace ditfleet
