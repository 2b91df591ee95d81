// shared/kernel_cache: the breaker, by a clock of the test's own.
#include "shared/kernel_cache/breaker.h"

#include <gtest/gtest.h>

namespace ditfleet::kernel_cache {
namespace {

using std::chrono::milliseconds;
using State = Breaker::State;

struct KernelCacheBreaker : ::testing::Test {
  Breaker::Clock::time_point now{};
  Breaker breaker{
      {.failures = 3, .slow = milliseconds(500), .open_first = milliseconds(1000), .open_max = milliseconds(5000)}};

  // One call that takes `took`; false if it was not let out.
  bool call(bool good, milliseconds took = milliseconds(1)) {
    const auto ticket = breaker.enter(now);
    if (!ticket) return false;
    now += took;
    breaker.leave(*ticket, good, now);
    return true;
  }
  void open() {
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(call(false));
    ASSERT_EQ(breaker.state(), State::kOpen);
  }
};

TEST_F(KernelCacheBreaker, OpensAfterFailuresInARow) {
  EXPECT_TRUE(call(false));
  EXPECT_TRUE(call(false));
  EXPECT_TRUE(call(true));  // the row begins anew
  EXPECT_TRUE(call(false));
  EXPECT_TRUE(call(false));
  EXPECT_EQ(breaker.state(), State::kClosed);
  EXPECT_TRUE(call(false));
  EXPECT_EQ(breaker.state(), State::kOpen);
  EXPECT_FALSE(call(true));
}

TEST_F(KernelCacheBreaker, ASlowAnswerIsAFailure) {
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(call(true, milliseconds(501)));
  EXPECT_EQ(breaker.state(), State::kOpen);
}

TEST_F(KernelCacheBreaker, LetsOneProbeOutAfterThePause) {
  open();
  now += milliseconds(999);
  EXPECT_FALSE(breaker.enter(now));
  now += milliseconds(1);
  const auto probe = breaker.enter(now);
  ASSERT_TRUE(probe);
  EXPECT_EQ(breaker.state(), State::kHalfOpen);
  EXPECT_FALSE(breaker.enter(now)) << "a second call went out beside the probe";
  breaker.leave(*probe, true, now);
  EXPECT_EQ(breaker.state(), State::kClosed);
  EXPECT_TRUE(call(true));
}

TEST_F(KernelCacheBreaker, PausesTwiceAsLongAfterEachProbeThatFails) {
  open();
  for (const int pause : {1000, 2000, 4000, 5000, 5000}) {
    now += milliseconds(pause - 2);
    EXPECT_FALSE(breaker.enter(now)) << pause;
    now += milliseconds(2);
    EXPECT_TRUE(call(false, milliseconds(0))) << pause;
    EXPECT_EQ(breaker.state(), State::kOpen);
  }
  now += milliseconds(5000);
  EXPECT_TRUE(call(true));
  open();
  now += milliseconds(1000);
  EXPECT_TRUE(breaker.enter(now)) << "the pause is not the first one again";
}

TEST_F(KernelCacheBreaker, WhatWasSentBeforeItOpenedCountsForNothing) {
  const auto late = breaker.enter(now);
  open();
  breaker.leave(*late, true, now);
  EXPECT_EQ(breaker.state(), State::kOpen);
  now += milliseconds(1000);
  const auto probe = breaker.enter(now);
  ASSERT_TRUE(probe);
  breaker.leave(*late, true, now);
  EXPECT_EQ(breaker.state(), State::kHalfOpen) << "an old answer closed it";
  breaker.leave(*late, false, now);
  EXPECT_EQ(breaker.state(), State::kHalfOpen);
  breaker.leave(*probe, true, now);
  EXPECT_EQ(breaker.state(), State::kClosed);
}

}  // namespace
}  // namespace ditfleet::kernel_cache
