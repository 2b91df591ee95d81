// What the watchdog calls stuck, on a clock that the test moves.
#include <gtest/gtest.h>

#include "worker/units/watchdog.h"

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;
using Work = Watchdog::Work;

class WatchdogTest : public testing::Test {
 protected:
  explicit WatchdogTest(std::chrono::milliseconds least = 60s, bool ranks = false) : watchdog_(least, ranks) {}

  // Moves the clock and checks at every interval, as the service does. The nonce of what is stuck, or "".
  std::string pass(Watchdog::Clock::duration time) {
    const auto end = now_ + time;
    std::string stuck;
    while (now_ < end && stuck.empty()) {
      now_ = std::min(end, now_ + Watchdog::Clock::duration(watchdog_.interval()));
      if (const auto found = watchdog_.check(now_)) stuck = found->nonce, message_ = found->message;
    }
    return stuck;
  }
  void begin(const std::string& nonce, Work work, const std::string& class_key = "demo/64") {
    watchdog_.began(nonce, work, class_key, now_);
  }
  void end(const std::string& nonce) { watchdog_.ended(nonce, now_); }
  // Work of this kind that took `time` and ended.
  void run(Work work, Watchdog::Clock::duration time, const std::string& class_key = "demo/64") {
    begin("n0", work, class_key);
    EXPECT_EQ(pass(time), "");
    end("n0");
  }

  Watchdog::Clock::time_point now_{1h};
  Watchdog watchdog_;
  std::string message_;
};

TEST_F(WatchdogTest, TheFirstOfAClassHasFiveTimesAsLong) {
  begin("n1", Work::kText);
  EXPECT_EQ(pass(300s), "");
  EXPECT_EQ(pass(1s), "n1");
  EXPECT_NE(message_.find("encoding the text of class demo/64 made no progress for 301000 ms"), std::string::npos)
      << message_;
  EXPECT_NE(message_.find("worker.stuck_ms (now 60000)"), std::string::npos) << message_;
}

TEST_F(WatchdogTest, OfSeveralTheLongestIsStuck) {
  begin("n2", Work::kImage);
  now_ += 1ms;
  begin("n1", Work::kImage);  // waits for it
  EXPECT_EQ(pass(301s), "n2");
}

TEST_F(WatchdogTest, LaterOnesHaveTwentyTimesTheSlowestOfTheirKindAndClass) {
  run(Work::kStep, 1s);
  begin("n1", Work::kStep);
  EXPECT_EQ(pass(60s), "") << "the minimum";
  EXPECT_EQ(pass(1s), "n1");
  end("n1");
  run(Work::kStep, 4s, "demo/512");
  begin("n1", Work::kStep, "demo/512");
  EXPECT_EQ(pass(80s), "");
  EXPECT_EQ(pass(1s), "n1");
  end("n1");
  begin("n1", Work::kDecode, "demo/512");
  EXPECT_EQ(pass(300s), "") << "nothing was decoded yet";
}

TEST_F(WatchdogTest, EveryStepIsProgress) {
  for (int step = 0; step < 100; ++step) {
    begin("n1", Work::kStep);
    EXPECT_EQ(pass(50s), "");
  }
  end("n1");
  EXPECT_EQ(pass(1h), "") << "it has ended";
  end("n1");
}

TEST_F(WatchdogTest, AChunkIsProgressForAllAdapters) {
  begin("n1", Work::kAdapters);
  begin("n2", Work::kAdapters);
  for (int chunk = 0; chunk < 100; ++chunk) {
    EXPECT_EQ(pass(200s), "");
    watchdog_.adapters_progressed(now_);
  }
  end("n1");
  EXPECT_EQ(pass(300s), "") << "adapters differ in size: a fast one says nothing about the next";
  EXPECT_EQ(pass(1s), "n2");
}

TEST_F(WatchdogTest, TimeInWhichTheProcessWasStoppedDoesNotCount) {
  run(Work::kStep, 1s);
  begin("n1", Work::kStep);
  EXPECT_EQ(pass(30s), "");
  now_ += 1h;
  EXPECT_EQ(pass(27s), "");
  EXPECT_EQ(pass(5s), "n1");
}

// The end of a step is heard before the first check after the stop, or before the first one of all.
class WatchdogAfterAStop : public WatchdogTest, public testing::WithParamInterface<int> {};
TEST_P(WatchdogAfterAStop, AStopDoesNotMakeAStepSlow) {
  begin("n1", Work::kStep);
  EXPECT_EQ(pass(std::chrono::seconds(GetParam())), "");
  now_ += 1h;
  begin("n1", Work::kStep);
  EXPECT_EQ(pass(60s), "");
  EXPECT_EQ(pass(2s), "n1");
}
INSTANTIATE_TEST_SUITE_P(Checked, WatchdogAfterAStop, testing::Values(0, 1));

class WatchdogOfRanks : public WatchdogTest {
 protected:
  explicit WatchdogOfRanks(std::chrono::milliseconds least = 60s) : WatchdogTest(least, true) {}
  void draw(Watchdog::Clock::duration first, Watchdog::Clock::duration step, const std::string& class_key = "demo/64") {
    run(Work::kFirstStep, first, class_key);
    run(Work::kStep, step, class_key);
    run(Work::kDecode, 10ms, class_key);
  }
};

TEST_F(WatchdogOfRanks, AStepHasTwoAndAHalfSecondsAndTwiceTheSlowest) {
  draw(30s, 500ms);
  run(Work::kStep, 100ms);  // as with a block cache
  begin("n1", Work::kStep);
  EXPECT_EQ(pass(3500ms), "");
  EXPECT_EQ(pass(300ms), "n1") << "whose 3 s and two steps are 4 s";
  end("n1");
  draw(1s, 10s, "demo/512");
  begin("n1", Work::kStep, "demo/512");
  EXPECT_EQ(pass(22500ms), "");
  EXPECT_EQ(pass(300ms), "n1");
}

TEST_F(WatchdogOfRanks, WhatMayCompileOrLoadHasLonger) {
  run(Work::kFirstStep, 1s);
  run(Work::kStep, 1s);
  run(Work::kStep, 59s);  // as one that uses another expert for the first time
  run(Work::kDecode, 1s);
  run(Work::kFirstStep, 59s);  // as one whose adapters are new
  run(Work::kPreview, 299s);
  begin("n1", Work::kStep, "demo/512");
  EXPECT_EQ(pass(300s), "") << "another shape";
  EXPECT_EQ(pass(1s), "n1");
}

TEST_F(WatchdogOfRanks, TimeInWhichAllWereStoppedDoesNotCount) {
  draw(1s, 10ms);
  begin("n1", Work::kStep);
  now_ += 1h;
  EXPECT_EQ(pass(2s), "");
  EXPECT_EQ(pass(1s), "n1");
}

class PatientWatchdogOfRanks : public WatchdogOfRanks {
 protected:
  PatientWatchdogOfRanks() : WatchdogOfRanks(300s) {}
};

TEST_F(PatientWatchdogOfRanks, AHigherLimitOfAllWorkIsOneOfStepsToo) {
  draw(1s, 10ms);
  begin("n1", Work::kStep);
  EXPECT_EQ(pass(12500ms), "");
  EXPECT_EQ(pass(300ms), "n1");
}

}  // namespace
}  // namespace ditfleet::worker
