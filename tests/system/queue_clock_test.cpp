// A host whose clock is off, beside a Redis whose clock is right: times of jobs are Redis'.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>

#include "tests/system/queue_fixture.h"

namespace {

std::int64_t host_is_ahead_s = 0;

}  // namespace

// What the standard library asks in this program.
extern "C" int clock_gettime(clockid_t clock, struct timespec* time) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += host_is_ahead_s;
  return result;
}

namespace ditfleet::testing {
namespace {

class QueueClock : public QueueTest {
 protected:
  ~QueueClock() override { host_is_ahead_s = 0; }
  std::int64_t redis_ms() {
    const auto time = redis({"TIME"});
    return std::stoll(time.elements.at(0).text) * 1000 + std::stoll(time.elements.at(1).text) / 1000;
  }
};

TEST_F(QueueClock, TheProgramsClockIsWhatTheseTestsSay) {
  using std::chrono::system_clock;
  const auto right = system_clock::now();
  host_is_ahead_s = -3600;
  EXPECT_LT(system_clock::now(), right - std::chrono::minutes(59));
}

TEST_F(QueueClock, AnEntryWasAddedWhenRedisSaysSo) {
  const auto began = redis_ms();
  for (const int ahead : {-3600, 3600}) {
    host_is_ahead_s = ahead;
    redis({"XADD", keys_.in(), "*", "spec", kSpec});
  }
  redis({"XADD", keys_.in(), "99999999999999-7", "spec", kSpec});
  for (const int ahead : {3600, -3600}) {
    host_is_ahead_s = ahead;
    client_->rewind_intake();
    const auto entries = intake();
    ASSERT_EQ(entries.size(), 3u);
    for (const auto& entry : entries) {
      EXPECT_GE(entry.created_ms, began);
      EXPECT_LE(entry.created_ms, redis_ms());
    }
  }
}

TEST_F(QueueClock, EndedJobsAreForgottenByTheClockOfRedis) {
  options_.retention_ms = 60'000;
  client_ = std::make_unique<queue::Client>(connection_, options_);
  const auto old = running(), fresh = running();
  ASSERT_TRUE(complete(old).ok());
  ASSERT_TRUE(complete(fresh).ok());
  const auto long_ago = std::to_string(redis_ms() - 120'000);
  redis({"ZADD", keys_.jobs(), long_ago, old.ref.job});
  redis({"HSET", keys_.job(old.ref.job), "ended", long_ago});
  host_is_ahead_s = -3600;
  reap();
  EXPECT_FALSE(wait(client_->job(old.ref.job, "", soon())).ok());
  EXPECT_TRUE(wait(client_->job(fresh.ref.job, "", soon())).ok());
}

}  // namespace
}  // namespace ditfleet::testing
