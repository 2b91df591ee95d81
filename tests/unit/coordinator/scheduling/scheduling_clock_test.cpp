#include <gtest/gtest.h>

#include "coordinator/scheduling/service/clock_watch.h"
#include "coordinator/scheduling/service/redis_clock.h"

namespace ditfleet::scheduling {
namespace {

using enum ClockWatch::Verdict;

constexpr std::int64_t kSecond = 1'000'000, kHour = 3600 * kSecond, kNow = 1'700'000'000 * kSecond;

struct Clock : ::testing::Test {
  // One second passes; Redis answers after `took_us`.
  ClockWatch::Verdict tick(std::int64_t took_us = 1000) {
    even += kSecond;
    watch.observe(even + offset, even - took_us / 2, even + took_us / 2);
    const auto verdict = watch.judge(seen, marked);
    if (verdict == kHold && marks) watch.on_marked(), marked = true;
    if (verdict == kRelease) marked = false;
    if (!watch.held()) seen = even + offset;
    return verdict;
  }
  ClockWatch watch{5 * kSecond};
  std::int64_t even = kHour, offset = kNow, seen = 0;
  bool marked = false, marks = true;
};

TEST_F(Clock, DriftAndSmallStepsAreFollowed) {
  for (int i = 0; i < 1000; ++i) {
    offset += i % 100 == 0 ? 4 * kSecond : 1000;
    ASSERT_EQ(tick(), kKeep);
  }
  for (int i = 0; i < 100; ++i) {
    offset -= 4 * kSecond;
    ASSERT_EQ(tick(), kKeep);
  }
}

TEST_F(Clock, AJumpIsHeldUntilTheClockIsBack) {
  for (const auto jump : {6 * kSecond, -6 * kSecond, 192 * kHour, -kHour}) {
    ASSERT_EQ(tick(), kKeep);
    offset += jump;
    ASSERT_EQ(tick(), kHold);
    EXPECT_NEAR(static_cast<double>(watch.jump_us()), static_cast<double>(jump), 2e6);
    ASSERT_EQ(tick(), kKeep);
    ASSERT_TRUE(watch.held());
    offset -= jump;
    ASSERT_EQ(tick(), kRelease);
    ASSERT_FALSE(watch.held());
  }
}

TEST_F(Clock, ASlowReplyIsNoJump) {
  tick();
  for (const auto took : {kSecond, 100 * kSecond, kSecond}) ASSERT_EQ(tick(took), kKeep);
}

TEST_F(Clock, AnOperatorAcceptsByRemovingTheMark) {
  tick();
  offset += kHour;
  marks = false;  // Redis does not store the mark
  ASSERT_EQ(tick(), kHold);
  ASSERT_EQ(tick(), kHold) << "an absent mark is no consent before there was one";
  marks = true;
  ASSERT_EQ(tick(), kHold);
  ASSERT_EQ(tick(), kKeep);
  marked = false;
  ASSERT_EQ(tick(), kRelease);
  ASSERT_EQ(tick(), kKeep);
  ASSERT_FALSE(watch.held());
}

TEST_F(Clock, AnHourIsEnough) {
  tick();
  offset -= 24 * kHour;
  ASSERT_EQ(tick(), kHold);
  even += kHour - 3 * kSecond;
  ASSERT_EQ(tick(), kKeep);
  even += 3 * kSecond;
  ASSERT_EQ(tick(), kRelease);
  ASSERT_EQ(tick(), kKeep);
}

TEST_F(Clock, AProcessThatSawNoJumpHoldsWhatIsMarked) {
  marked = true;
  ASSERT_EQ(tick(), kHold);
  ASSERT_EQ(tick(), kKeep);
  marked = false;
  ASSERT_EQ(tick(), kRelease);
}

TEST_F(Clock, AClockBehindTheLatestLeaderIsHeldUntilItHasCaughtUp) {
  seen = even + offset + kHour;
  ASSERT_EQ(tick(), kHold);
  ASSERT_EQ(tick(), kKeep);
  offset += 2 * kHour;
  ASSERT_EQ(tick(), kRelease);
}

TEST_F(Clock, AJumpThatAnotherLeaderHasFollowedIsNone) {
  tick();
  offset += 24 * kHour;
  seen = even + offset;  // this process did not lead meanwhile
  ASSERT_EQ(tick(), kKeep);
  ASSERT_EQ(tick(), kKeep);
}

TEST_F(Clock, TimeWithoutACoordinatorIsNoJump) {
  seen = even + offset - 48 * kHour;
  ASSERT_EQ(tick(), kKeep);
}

TEST(RedisClock, NeverGoesBackForASmallStep) {
  RedisClock clock;
  clock.sync(kNow, kHour - 500, kHour + 500);
  EXPECT_EQ(clock.now_us(kHour), kNow);
  EXPECT_EQ(clock.now_us(kHour + 250), kNow + 250);
  clock.sync(kNow + kSecond - 400'000, kHour + kSecond, kHour + kSecond);  // 0.4 s slower
  EXPECT_EQ(clock.now_us(kHour + kSecond - 900'000), kNow + 250) << "it waits until the corrected time gets there";
  EXPECT_EQ(clock.now_us(kHour + kSecond), kNow + kSecond - 400'000);
}

TEST(RedisClock, FollowsALargeStepBackAndAnyStepForward) {
  RedisClock clock;
  clock.sync(kNow, kHour, kHour);
  EXPECT_EQ(clock.now_us(kHour), kNow);
  clock.sync(kNow + kHour, kHour, kHour);
  EXPECT_EQ(clock.now_us(kHour), kNow + kHour);
  clock.sync(kNow + kHour - kSecond, kHour, kHour);  // exactly a second: still a correction
  EXPECT_EQ(clock.now_us(kHour), kNow + kHour);
  clock.sync(kNow - 1, kHour, kHour);
  EXPECT_EQ(clock.now_us(kHour), kNow - 1);
}

}  // namespace
}  // namespace ditfleet::scheduling
