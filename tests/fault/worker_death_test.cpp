// Workers are killed, stopped or cannot store results.
#include <sys/resource.h>

#include <iostream>
#include <set>

#include "tests/fault/service_fixture.h"

namespace ditfleet::testing {
namespace {

// About five seconds of denoising on one core, so that a fault hits a running unit.
constexpr int kLongSteps = 120, kLongSide = 512;

class WorkerDeath : public ServiceTest {
 protected:
  struct Denoising {
    std::string id, worker;
    pid_t pid = -1;
  };
  // Starts two workers and a job, and waits until one worker is denoising it.
  void denoise_on_one_of_two(Denoising& job, const std::vector<std::string>& sets = {}) {
    start(2, sets);
    if (HasFatalFailure()) return;
    job.id = submit(kLongSteps, 1, kLongSide);
    EXPECT_TRUE(until([&] { return events(job.id, "step").size() >= 1; }, 60s)) << history(job.id);
    const auto started = events(job.id, "started");
    if (!started.empty()) job.worker = started.front().fields.at("worker");
    EXPECT_FALSE(ended(job.id)) << "the job ended before the fault; give it more steps";
    job.pid = pid_of_worker(job.worker);
    ASSERT_GT(job.pid, 1);
  }
};

TEST_F(WorkerDeath, AWorkerKilledWhileDenoising) {
  Denoising denoising;
  denoise_on_one_of_two(denoising);
  if (HasFatalFailure()) return;
  const auto& [id, first, pid] = denoising;
  const auto began = Deadline::Clock::now();
  ASSERT_EQ(::kill(pid, SIGKILL), 0);
  ASSERT_TRUE(until([&] { return events(id, "started").size() == 2; }, 60s)) << history(id);
  const auto took = std::chrono::duration<double>(Deadline::Clock::now() - began).count();
  std::cout << "restarted after " << took << " s\n";
  EXPECT_LE(took, 8.0);  // the guarantee: a lease of 5 s plus the time to detect its end
  EXPECT_NE(events(id, "started")[1].fields.at("worker"), first) << history(id);
  expect_all_ended_once({id}, 120s);
}

TEST_F(WorkerDeath, AWorkerStoppedPastItsLeaseThatContinues) {
  Denoising denoising;
  denoise_on_one_of_two(denoising, {"queue.lease_ms=2000", "queue.renew_ms=400"});
  if (HasFatalFailure()) return;
  const auto& [id, first, pid] = denoising;
  ASSERT_EQ(::kill(pid, SIGSTOP), 0);
  const bool again = until([&] { return events(id, "started").size() == 2; }, 60s);
  const bool done = again && until([&] { return ended(id); }, 120s);
  const auto record = job(id);
  const auto before = done ? image(id) : "";
  ASSERT_EQ(::kill(pid, SIGCONT), 0);  // before any assertion, because a stopped process does not exit
  ASSERT_TRUE(done) << history(id);
  ASSERT_EQ(before.substr(1, 3), "PNG") << before.substr(0, 200);
  nap(5s);  // time to finish the old attempt, if the worker were not fenced
  EXPECT_EQ(job(id)->unit_records[0].manifest, record->unit_records[0].manifest);
  EXPECT_EQ(image(id), before);
  EXPECT_EQ(events(id, "started").size(), 2u) << history(id);
  expect_all_ended_once({id, submit(2), submit(2), submit(2)}, 120s);  // the service still works
}

TEST_F(WorkerDeath, AllWorkersKilledAtOnce) {
  start(2, {"queue.lease_ms=2000", "queue.renew_ms=400"});
  if (HasFatalFailure()) return;
  std::vector<std::string> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(submit(kLongSteps / 2, 1, kLongSide / 2));
  for (int i = 0; i < 8; ++i) ids.push_back(submit(2, 2));
  ASSERT_TRUE(until([&] { return events(ids[0], "step").size() + events(ids[1], "step").size() >= 2; }, 60s))
      << history(ids[0]);
  for (const pid_t pid : pids_of_workers()) EXPECT_EQ(::kill(pid, SIGKILL), 0);
  ids.push_back(submit(2));  // accepted without a worker
  expect_all_ended_once(ids, 120s);
}

// The test kills every worker that starts the poison job. Other jobs must succeed.
TEST_F(WorkerDeath, APoisonJobIsDeadLetteredAndHarmsNoOther) {
  start(2, {"queue.lease_ms=2000", "queue.renew_ms=400"});
  if (HasFatalFailure()) return;
  const auto poison = submit(200, 1, kLongSide);
  std::vector<std::string> others;
  for (int i = 0; i < 10; ++i) others.push_back(submit(2));
  std::size_t deaths = 0;
  const bool dead_lettered = until(
      [&] {
        const auto started = events(poison, "started");
        if (started.size() > deaths) {
          const pid_t pid = pid_of_worker(started.back().fields.at("worker"));
          if (pid > 1 && ::kill(pid, SIGKILL) == 0) ++deaths;
          others.push_back(submit(2));
        }
        return ended(poison);
      },
      120s);
  ASSERT_TRUE(dead_lettered) << history(poison);
  ASSERT_EQ(deaths, 2u) << "queue.max_crashes is 2:" << history(poison);
  const auto record = job(poison);
  ASSERT_EQ(record->state, job::State::kFailed) << history(poison);
  ASSERT_TRUE(record->error.has_value());
  EXPECT_NE(record->error->message.find("2 workers were lost"), std::string::npos) << record->error->message;
  EXPECT_EQ(faults_in(events(poison)), "");
  const auto dead = redis({"XRANGE", "df:{0}:dead", "-", "+"});
  ASSERT_EQ(dead.elements.size(), 1u);
  EXPECT_NE(std::find_if(dead.elements[0].elements[1].elements.begin(), dead.elements[0].elements[1].elements.end(),
                         [&](const auto& word) { return word.text == poison; }),
            dead.elements[0].elements[1].elements.end());
  expect_all_ended_once(others, 120s);
}

// A file size limit makes the worker see a full disk. No partial result is served or left, the error names the reason,
// and the service works again once the limit is lifted.
TEST_F(WorkerDeath, ResultsThatCannotBeStoredFailAndLeaveNoFile) {
  start(1, {"results.backend=file", "queue.retry_backoff_ms=100", "queue.max_attempts=2"});
  if (HasFatalFailure()) return;
  const auto good = submit(2);
  expect_all_ended_once({good}, 60s);
  const auto files = [&] {
    std::set<std::string> found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(dir_ + "/data/results")) {
      if (entry.is_regular_file()) found.insert(entry.path());
    }
    return found;
  };
  const auto before = files();
  EXPECT_EQ(before.size(), 1u);
  const pid_t worker = pids_of_workers().at(0);
  rlimit old{}, tiny{};
  ASSERT_EQ(::prlimit(worker, RLIMIT_FSIZE, nullptr, &old), 0);
  tiny = old;
  tiny.rlim_cur = 64;  // less than any image, so the write stops in the middle
  ASSERT_EQ(::prlimit(worker, RLIMIT_FSIZE, &tiny, nullptr), 0);
  const auto bad = submit(2);
  EXPECT_TRUE(until([&] { return ended(bad); }, 120s)) << history(bad);
  EXPECT_EQ(pids_of_workers(), std::vector<pid_t>{worker}) << "the worker exited";
  ASSERT_EQ(::prlimit(worker, RLIMIT_FSIZE, &old, nullptr), 0);
  const auto record = job(bad);
  ASSERT_EQ(record->state, job::State::kFailed) << history(bad);
  ASSERT_TRUE(record->error.has_value());
  EXPECT_NE(record->error->message.find("results"), std::string::npos) << record->error->message;
  std::cout << record->error->message << "\n";
  EXPECT_TRUE(record->unit_records.at(0).manifest.empty()) << record->unit_records[0].manifest;
  EXPECT_EQ(faults_in(events(bad)), "");
  EXPECT_EQ(files(), before) << "a partial file was left";
  const auto after = submit(2);
  expect_all_ended_once({after}, 60s);
  EXPECT_EQ(image(after), image(good));  // the same request
  EXPECT_EQ(image(after).substr(1, 3), "PNG");
}

}  // namespace
}  // namespace ditfleet::testing
