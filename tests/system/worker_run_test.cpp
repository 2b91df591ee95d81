// `ditfleet-worker run` as a process on a Redis of somebody else; the test plays the scheduler.
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>

#include "shared/core/bytes.h"
#include "shared/job/validate.h"
#include "shared/results/store.h"
#include "tests/paths.h"
#include "tests/system/program.h"
#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using namespace std::chrono_literals;
using job::State;
using ::testing::HasSubstr;

const std::string kModel = source_path("tests/fixtures/flux/dev/model");

class WorkerRun : public QueueTest {
 protected:
  explicit WorkerRun(RedisServer::Options server = {}) : QueueTest(server) {}

  std::unique_ptr<Program> start_worker(std::vector<std::string> more = {}) {
    std::vector<std::string> words = {"run",      "--redis", server_.url(),     "--model", "tiny=" + kModel,
                                      "--device", "cpu",     "--dtype",         "fp32",    "--name",
                                      "w1",       "--set",   "worker.threads=1"};
    if (!server_.ca_file().empty()) words.insert(words.end(), {"--set", "redis.tls_ca_file=" + server_.ca_file()});
    words.insert(words.end(), more.begin(), more.end());
    auto program = std::make_unique<Program>("ditfleet-worker", words);
    EXPECT_TRUE(until([&] {
      auto all = wait(client_->workers(soon()));
      if (!all || all->empty() || all->front().state != "ready") return false;
      owner_ = all->front().name + ":" + all->front().boot;
      return true;
    })) << program->err();
    return program;
  }
  template <class F>
  bool until(F condition, std::chrono::milliseconds limit = 60s) {
    const auto deadline = Deadline::after(limit);
    while (!condition()) {
      if (deadline.passed()) return false;
      std::this_thread::sleep_for(5ms);
    }
    return true;
  }
  // Admitted; complete, as a worker takes it.
  std::string ready(int steps, const std::string& prompt = "a red circle", const std::string& traceparent = "",
                    int side = 64) {
    job::JobSpec spec;
    spec.model = "tiny";
    spec.prompt = prompt;
    spec.n = 1;
    spec.seed = 5;
    spec.fields.set("width", side);
    spec.fields.set("height", side);
    spec.fields.set("num_inference_steps", steps);
    spec.output_format = job::OutputFormat::kPng;
    spec.output_compression = 100;
    queue::Submission s = submission();
    s.spec = job::to_json(spec);
    s.traceparent = traceparent;
    const std::string id = submit(s);
    admit_all();
    return id;
  }
  // One that takes a while: many steps of many tokens.
  std::string ready_slow(int steps) { return ready(steps, "a red circle", "", 256); }
  void expect_drawn(const std::string& id) {
    ASSERT_TRUE(until([&] { return job::is_terminal(job(id).state); }));
    const auto record = job(id);
    ASSERT_EQ(record.state, State::kSucceeded) << (record.error ? record.error->message : "");
    auto manifest = results::Manifest::parse(record.unit_records.at(0).manifest);
    ASSERT_TRUE(manifest);
    auto store = *results::open_store({}, connection_);
    auto bytes = wait(store->get(*manifest, soon()));
    ASSERT_TRUE(bytes) << bytes.error().message;
    EXPECT_EQ(bytes->substr(0, 4), "\x89PNG");
  }
  long rss_kib(pid_t pid) {
    const auto status = read_file("/proc/" + std::to_string(pid) + "/status");
    const auto at = status ? status->find("VmRSS:") : std::string::npos;
    return at == std::string::npos ? -1 : std::stol(status->substr(at + 6));
  }

  std::string owner_;
};

TEST_F(WorkerRun, DrawsAndTellsOfTruncatedPromptsInTheJobsRecord) {
  auto worker = start_worker();
  std::string prompt;
  for (int i = 0; i < 600; ++i) prompt += "red circle ";
  const std::string id = ready(2, prompt);
  assign(id, 0, owner_);
  expect_drawn(id);
  const auto warnings = job(id).warnings;
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_THAT(warnings[0], HasSubstr("77"));
  EXPECT_THAT(warnings[1], HasSubstr("512"));
}

TEST_F(WorkerRun, TheLogNamesTheTraceOfTheJob) {
  auto worker = start_worker({"--set", "log.format=json"});
  const std::string trace = "4bf92f3577b34da6a3ce929d0e0e4736";
  const std::string id = ready(1, "a", "00-" + trace + "-00f067aa0ba902b7-01");
  assign(id, 0, owner_);
  expect_drawn(id);
  EXPECT_TRUE(until([&] { return worker->err().find("succeeded") != std::string::npos; }));
  std::istringstream lines(worker->err());
  int told = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.find(id) == std::string::npos) continue;
    ++told;
    EXPECT_THAT(line, HasSubstr(trace));
  }
  EXPECT_GE(told, 2);
}

TEST_F(WorkerRun, SigtermFinishesWhatRunsAndHandsBackTheRest) {
  auto worker = start_worker();
  const std::string first = ready_slow(100), second = ready(1);
  assign(first, 0, owner_);
  assign(second, 0, owner_);
  // Not just running: the worker hands back a unit whose start is not answered yet.
  ASSERT_TRUE(until([&] { return job(first).unit_records.at(0).step > 0; }));
  worker->send(SIGTERM);
  EXPECT_TRUE(until([&] { return job(second).state == State::kReady; }));
  EXPECT_EQ(worker->wait(), 0) << worker->err();
  expect_drawn(first);
  EXPECT_TRUE(wait(client_->workers(soon()))->empty()) << "it deregisters";
}

TEST_F(WorkerRun, ATerminalThatClosesDrainsItToo) {
  auto worker = start_worker();
  worker->send(SIGHUP);
  EXPECT_EQ(worker->wait(10s), 0) << worker->err();
  EXPECT_TRUE(wait(client_->workers(soon()))->empty()) << "it deregisters";
}

TEST_F(WorkerRun, ASecondSignalEndsItAtOnceAndHandsBackEverything) {
  auto worker = start_worker();
  const std::string id = ready_slow(200);
  assign(id, 0, owner_);
  ASSERT_TRUE(until([&] { return job(id).state == State::kRunning; }));
  worker->send(SIGTERM);
  ASSERT_TRUE(until([&] { return worker->err().find("draining") != std::string::npos; }));
  worker->send(SIGTERM);
  EXPECT_EQ(worker->wait(10s), 0) << worker->err();
  EXPECT_EQ(job(id).state, State::kReady);
}

// The allocator's own ups and downs are some 10 MiB, so the least of a late stretch is held against the most of an
// early one: what leaks lifts both.
TEST_F(WorkerRun, MemoryStaysFlatOverManyJobs) {
  auto worker = start_worker();
  constexpr int kJobs = 500, kStretch = 100, kWarm = 100;
  long early = 0, late = std::numeric_limits<long>::max();
  std::vector<std::string> open;
  for (int i = 0; i < kJobs; ++i) {
    open.push_back(ready(1, "a red circle number " + std::to_string(i)));
    assign(open.back(), 0, owner_);
    if (i % 50 == 0) lead();        // the lease of a leader is not meant for so long a turn
    if (open.size() < 2) continue;  // one ahead, as the scheduler does
    ASSERT_TRUE(until([&] { return job(open.front()).state == State::kSucceeded; })) << worker->err();
    open.erase(open.begin());
    if (i >= kWarm && i < kWarm + kStretch) early = std::max(early, rss_kib(worker->pid()));
    if (i >= kJobs - kStretch) late = std::min(late, rss_kib(worker->pid()));
  }
  ASSERT_GT(early, 0);
  std::cout << "resident: at most " << early << " KiB in jobs 100 to 200, at least " << late
            << " KiB in jobs 400 to 500\n";
  EXPECT_LT(late, early + 4 * 1024) << "KiB of resident memory";
}

TEST_F(WorkerRun, RedisMayComeLater) {
  server_.kill();
  Program worker("ditfleet-worker",
                 {"run", "--redis", server_.url(), "--model", "tiny=" + kModel, "--device", "cpu", "--name", "w1"});
  ASSERT_TRUE(until([&] { return worker.err().find("cannot register") != std::string::npos; }, 20s));
  server_.restart();
  EXPECT_TRUE(until(
      [&] {
        auto all = wait(client_->workers(soon()));
        return all && all->size() == 1 && all->front().state == "ready";
      },
      30s))
      << worker.err();
  worker.send(SIGINT);
  EXPECT_EQ(worker.wait(10s), 0) << worker.err();
}

struct SecureWorkerRun : WorkerRun {
  static RedisServer::Options secure() {
    RedisServer::Options options;
    options.tls = true;
    options.password = "not-for-the-log";
    return options;
  }
  SecureWorkerRun() : WorkerRun(secure()) {}
};

TEST_F(SecureWorkerRun, TlsAndPassword) {
  auto worker = start_worker();
  const std::string id = ready(1);
  assign(id, 0, owner_);
  expect_drawn(id);
  EXPECT_THAT(worker->err(), ::testing::Not(HasSubstr("not-for-the-log"))) << "the password is not for the log";
  worker->send(SIGTERM);
  EXPECT_EQ(worker->wait(10s), 0);
}

}  // namespace
}  // namespace ditfleet::testing
