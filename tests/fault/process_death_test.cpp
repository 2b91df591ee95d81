// What the service promises when its processes die or stand still, on real binaries.
#include <iostream>

#include "tests/fault/service_fixture.h"

namespace ditfleet::testing {
namespace {

// Long enough to be hit while it denoises: some ten seconds on one core.
constexpr int kLongSteps = 200, kLongSide = 512;

class ProcessDeath : public ServiceTest {
 protected:
  // A job that is being denoised, and by which worker.
  std::string denoising(std::string& worker) {
    const auto id = submit(kLongSteps, 1, kLongSide);
    EXPECT_TRUE(until([&] { return events(id, "step").size() >= 1; }, 30s)) << history(id);
    const auto started = events(id, "started");
    if (!started.empty()) worker = started.front().fields.at("worker");
    EXPECT_FALSE(ended(id)) << "it ended before the fault: make it longer";
    return id;
  }
};

TEST_F(ProcessDeath, a_worker_killed_while_it_denoises) {
  start(2);
  if (HasFatalFailure()) return;
  std::string first;
  const auto id = denoising(first);
  const pid_t pid = pid_of_worker(first);
  ASSERT_GT(pid, 1);
  const auto began = Deadline::Clock::now();
  ASSERT_EQ(::kill(pid, SIGKILL), 0);
  ASSERT_TRUE(until([&] { return events(id, "started").size() == 2; }, 20s)) << history(id);
  const auto took = std::chrono::duration<double>(Deadline::Clock::now() - began).count();
  std::cout << "started again after " << took << " s\n";
  EXPECT_LE(took, 8.0);
  EXPECT_NE(events(id, "started")[1].fields.at("worker"), first) << history(id);
  expect_all_ended_once({id}, 120s);
}

TEST_F(ProcessDeath, a_worker_that_stands_still_past_its_lease_and_goes_on) {
  start(2);
  if (HasFatalFailure()) return;
  std::string first;
  const auto id = denoising(first);
  const pid_t pid = pid_of_worker(first);
  ASSERT_GT(pid, 1);
  ASSERT_EQ(::kill(pid, SIGSTOP), 0);
  const bool again = until([&] { return events(id, "started").size() == 2; }, 20s);
  const bool done = again && until([&] { return ended(id); }, 120s);
  const auto record = job(id);
  const auto before = picture(id);
  ASSERT_EQ(::kill(pid, SIGCONT), 0);  // before anything may fail: a stopped process does not end
  ASSERT_TRUE(done) << history(id);
  ASSERT_EQ(before.substr(1, 3), "PNG") << before.substr(0, 200);
  nap(5s);  // time to finish what it was at, if it dared
  EXPECT_EQ(ends(id), 1) << history(id);
  EXPECT_EQ(job(id)->unit_records[0].manifest, record->unit_records[0].manifest);
  EXPECT_EQ(picture(id), before);
  EXPECT_EQ(events(id, "started").size(), 2u) << history(id);
  expect_all_ended_once({id, submit(2), submit(2), submit(2)}, 60s);  // and it still works
}

TEST_F(ProcessDeath, a_coordinator_killed_and_started_again) {
  start(2);
  if (HasFatalFailure()) return;
  std::vector<std::string> ids;
  for (int i = 0; i < 20; ++i) ids.push_back(submit(4, 1 + i % 3));
  ASSERT_EQ(::kill(pid_of("coordinator"), SIGKILL), 0);
  for (int i = 0; i < 20; ++i) {  // taken while nobody leads
    ids.push_back(submit(4));
    nap(10ms);
  }
  expect_all_ended_once(ids, 120s);
}

TEST_F(ProcessDeath, redis_killed_and_started_again) {
  start(2);
  if (HasFatalFailure()) return;
  std::vector<std::string> ids;
  for (int i = 0; i < 20; ++i) ids.push_back(submit(4, 1 + i % 3));
  ASSERT_EQ(::kill(pid_of("redis"), SIGKILL), 0);
  for (int i = 0; i < 20; ++i) ids.push_back(submit(4));  // waits for Redis to be back
  expect_all_ended_once(ids, 180s);
}

}  // namespace
}  // namespace ditfleet::testing
