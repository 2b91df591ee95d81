// Repeated messages are logged ever more rarely.
#include "shared/core/log_throttle.h"

#include <gtest/gtest.h>

namespace ditfleet {
namespace {

using namespace std::chrono_literals;

TEST(LogThrottle, AdmitsTheFirstMessageAndThenBacksOff) {
  LogThrottle throttle;
  auto now = LogThrottle::Clock::time_point(1h);
  std::vector<std::pair<std::chrono::milliseconds, std::string>> admitted;
  const auto from = now;
  for (int i = 0; i < 4 * 60 * 10; ++i, now += 250ms) {
    if (const auto more = throttle.admit(now))
      admitted.emplace_back(std::chrono::duration_cast<std::chrono::milliseconds>(now - from), *more);
  }
  ASSERT_GE(admitted.size(), 5u);
  EXPECT_LE(admitted.size(), 16u);  // in ten minutes
  EXPECT_EQ(admitted[0].first, 0ms);
  EXPECT_EQ(admitted[0].second, "");
  EXPECT_EQ(admitted[1].first, 1s);
  EXPECT_EQ(admitted[1].second, " (3 more like this since the last message)");
  EXPECT_EQ(admitted[2].first, 3s);
  EXPECT_EQ(admitted[3].first, 7s);
  EXPECT_EQ(admitted.back().first - admitted[admitted.size() - 2].first, 60s);
  EXPECT_EQ(admitted.back().second, " (239 more like this since the last message)");
  throttle.reset();
  EXPECT_EQ(throttle.admit(now), "");
  EXPECT_EQ(throttle.admit(now), std::nullopt);
}

}  // namespace
}  // namespace ditfleet
