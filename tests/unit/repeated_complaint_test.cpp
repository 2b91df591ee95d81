// The same trouble told four times a second is told ever more rarely.
#include "shared/core/repeated_complaint.h"

#include <gtest/gtest.h>

namespace ditfleet {
namespace {

using namespace std::chrono_literals;

TEST(RepeatedComplaint, IsSaidOnceAndThenWithGrowingPauses) {
  RepeatedComplaint complaint;
  auto now = RepeatedComplaint::Clock::time_point(1h);
  std::vector<std::pair<std::chrono::milliseconds, std::string>> said;
  const auto from = now;
  for (int i = 0; i < 4 * 60 * 10; ++i, now += 250ms) {
    if (const auto more = complaint.said(now))
      said.emplace_back(std::chrono::duration_cast<std::chrono::milliseconds>(now - from), *more);
  }
  ASSERT_GE(said.size(), 5u);
  EXPECT_LE(said.size(), 16u);  // in ten minutes
  EXPECT_EQ(said[0].first, 0ms);
  EXPECT_EQ(said[0].second, "");
  EXPECT_EQ(said[1].first, 1s);
  EXPECT_EQ(said[1].second, " (3 more like this since the last line)");
  EXPECT_EQ(said[2].first, 3s);
  EXPECT_EQ(said[3].first, 7s);
  EXPECT_EQ(said.back().first - said[said.size() - 2].first, 60s);
  EXPECT_EQ(said.back().second, " (239 more like this since the last line)");
  complaint.over();
  EXPECT_EQ(complaint.said(now), "");
  EXPECT_EQ(complaint.said(now), std::nullopt);
}

}  // namespace
}  // namespace ditfleet
