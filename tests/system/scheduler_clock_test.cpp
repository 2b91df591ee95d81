// The clock of Redis jumps (clock_shift.cpp) while jobs are open, delayed, running and ended.
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>

#include "tests/paths.h"
#include "tests/system/scheduler_service_fixture.h"
#include "tests/system/temporary_folder.h"

namespace ditfleet::testing {
namespace {

class ClockFile {
 public:
  ClockFile() {
    shift(0s);
    ::setenv("CLOCK_SHIFT_FILE", path().c_str(), 1);
    ::setenv("LD_PRELOAD", test_library("clock_shift").c_str(), 1);  // for processes that this one starts
  }
  ~ClockFile() {
    ::unsetenv("LD_PRELOAD");
    ::unsetenv("CLOCK_SHIFT_FILE");
  }
  void shift(std::chrono::seconds by) {
    const std::int64_t seconds = by.count();
    const UniqueFd file(::open(path().c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    ASSERT_EQ(::pwrite(file.get(), &seconds, sizeof seconds, 0), static_cast<ssize_t>(sizeof seconds));
  }

 private:
  std::string path() const { return folder_.path() + "/clock"; }
  TemporaryFolder folder_;
};

queue::QueueOptions quick_retries() {
  auto out = short_leases();
  out.max_age_ms = 7 * 86'400'000;
  out.retry_backoff_ms = out.retry_backoff_max_ms = 4000;
  return out;
}

// The file must exist before Redis starts.
class SchedulerClock : private ClockFile, public SchedulerServiceTest {
 protected:
  SchedulerClock() : SchedulerServiceTest({}, quick_retries()) {}

  void jump(std::chrono::seconds by) { shift(by); }
  bool held() const {
    return std::any_of(coordinators_.begin(), coordinators_.end(), [](const auto& c) {
      if (!c->service || !c->service->leading()) return false;
      const auto warnings = c->service->warnings();
      return std::any_of(warnings.begin(), warnings.end(),
                         [](const auto& w) { return w.find("redis-cli DEL 'df:{0}:clock'") != w.npos; });
    });
  }
  bool led() const {
    return std::any_of(coordinators_.begin(), coordinators_.end(),
                       [](const auto& c) { return c->service && c->service->leading(); });
  }
  void accept() { redis({"DEL", keys_.clock()}); }
  bool known(const std::string& id) { return wait(client_->job(id, "", soon())).ok(); }
  std::string submit_with_deadline(std::chrono::milliseconds deadline) {
    auto s = submission();
    s.spec = kTiny;
    s.deadline_in_ms = deadline.count();
    return submit(s);
  }
  // Jobs in every state when the clock jumps: nothing is lost, swept, expired or run twice.
  void jobs_survive(std::chrono::seconds by);
  std::string old_;  // a job that had ended before
};

void SchedulerClock::jobs_survive(std::chrono::seconds by) {
  std::string slow, flaky;
  int failures = 0;
  coordinate("c1");
  coordinate("c2");
  NullWorker& steady =
      worker({.name = "steady",
              .lease = 1500ms,
              .run_of = [&](const queue::UnitRef& unit) { return unit.job == slow ? 4000ms : 0ms; },
              .fails_on = [&](const queue::UnitRef& unit) { return unit.job == flaky && ++failures == 1; },
              .backoff = 4000ms});
  ASSERT_TRUE(until([&] { return led(); }));
  old_ = submit_tiny();
  ASSERT_TRUE(until([&] { return ended(old_); }));
  flaky = new_id();
  auto failing = submission(flaky);
  failing.spec = kTiny;
  submit(failing);
  ASSERT_TRUE(until([&] { return redis({"ZCARD", keys_.delayed()}).integer == 1; }));
  slow = new_id();
  auto running = submission(slow);
  running.spec = kTiny;
  submit(running);
  ASSERT_TRUE(until([&] { return state_of(slow) == job::State::kRunning; }));
  std::vector<std::string> ids = {slow, flaky, submit_tiny(), submit_with_deadline(600s)};

  jump(by);
  ASSERT_TRUE(until([&] { return held(); }));
  ids.push_back(submit_tiny());
  for (const auto& id : ids) {
    ASSERT_TRUE(until([&] { return ended(id); })) << event_types(id);
    EXPECT_EQ(state_of(id), job::State::kSucceeded) << event_types(id);
    EXPECT_EQ(ends(id), 1) << event_types(id);
  }
  for (const auto& id : ids) {
    EXPECT_EQ(std::count_if(steady.started.begin(), steady.started.end(), [&](const auto& u) { return u.job == id; }),
              id == flaky ? 2 : 1)
        << event_types(id);
  }
  wait(nap(1s));  // some sweeps
  EXPECT_TRUE(held());
  EXPECT_TRUE(known(old_));
  accept();
  ASSERT_TRUE(until([&] { return led() && !held(); }));
  const auto later = submit_tiny();
  ASSERT_TRUE(until([&] { return ended(later); }));
}

TEST_F(SchedulerClock, an_hour_forward) { jobs_survive(1h); }

TEST_F(SchedulerClock, eight_days_forward) {
  jobs_survive(192h);
  ASSERT_TRUE(until([&] { return !known(old_); })) << "by the clock that was accepted it is old";
}

TEST_F(SchedulerClock, an_hour_back) { jobs_survive(-1h); }

TEST_F(SchedulerClock,
       another_coordinator_goes_on_holding_and_lost_workers_units_run_again_once_the_clock_is_accepted) {
  coordinate("c1");
  ASSERT_TRUE(until([&] { return led(); }));
  NullWorker& lost = worker({.name = "lost", .run = 600s, .lease = 1500ms});
  const auto id = submit_tiny();
  ASSERT_TRUE(until([&] { return state_of(id) == job::State::kRunning; }));
  jump(-8h);
  ASSERT_TRUE(until([&] { return held(); }));
  lost.vanish();
  drop(*coordinators_.back());
  coordinate("c2");
  ASSERT_TRUE(until([&] { return held(); })) << "a process that did not see the jump";
  worker({.name = "other", .lease = 1500ms});
  wait(nap(3s));  // two leases
  EXPECT_EQ(state_of(id), job::State::kRunning);
  accept();
  ASSERT_TRUE(until([&] { return ended(id); })) << event_types(id);
}

TEST_F(SchedulerClock, a_clock_set_back_while_no_coordinator_runs_stops_nobody_and_is_followed_when_it_is_mended) {
  coordinate("c1");
  worker();
  ASSERT_TRUE(until([&] { return led() && redis({"HEXISTS", keys_.clock(), "seen"}).integer == 1; }));
  drop(*coordinators_.back());  // its key would keep others from leading for an hour
  jump(-1h);
  coordinate("c2");
  ASSERT_TRUE(until([&] { return held(); }));
  const auto id = submit_tiny();
  ASSERT_TRUE(until([&] { return ended(id); }));
  jump(0s);
  ASSERT_TRUE(until([&] { return led() && !held(); }));
  const auto next = submit_tiny();
  ASSERT_TRUE(until([&] { return ended(next); }));
}

}  // namespace
}  // namespace ditfleet::testing
