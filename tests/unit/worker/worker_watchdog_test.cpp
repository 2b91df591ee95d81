// What the watchdog calls stuck, on a clock that the test moves.
#include <gtest/gtest.h>

#include "worker/units/watchdog.h"

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;
using Work = Watchdog::Work;

class WatchdogTest : public testing::Test {
 protected:
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
  Watchdog watchdog_{60s};
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

}  // namespace
}  // namespace ditfleet::worker
