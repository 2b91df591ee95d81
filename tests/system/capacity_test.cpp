// The history of a real coordinator, and whether `ditfleet capacity` predicts the latencies that were observed.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include "coordinator/simulation/simulation.h"
#include "shared/core/json.h"
#include "shared/core/wall_clock.h"
#include "tests/paths.h"
#include "tests/system/null_worker.h"
#include "tests/system/program.h"
#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using ::testing::HasSubstr;

// The service's default durability.
class CapacityTest : public QueueTest {
 protected:
  CapacityTest() : QueueTest({.appendfsync = "everysec"}) {}

  void coordinate() {
    coordinator_ = std::make_unique<Program>(
        "ditfleet",
        std::vector<std::string>{"coordinator", "--json", "--listen", "127.0.0.1:0", "--redis", server_.url(), "--set",
                                 "models.tiny=" + source_path("tests/fixtures/flux/dev/model")});
    ASSERT_TRUE(until([&] { return coordinator_->out().find("}") != std::string::npos; })) << coordinator_->err();
    const auto out = coordinator_->out();
    const auto from = out.find("http"), to = out.find('"', from);
    url_ = out.substr(from, to - from);
  }
  template <class F>
  bool until(F condition, std::chrono::seconds limit = 60s) {
    const auto deadline = Deadline::after(limit);
    while (!condition()) {
      if (deadline.passed()) return false;
      wait(nap(20ms));
    }
    return true;
  }
  asio::awaitable<bool> nap(std::chrono::microseconds time) {
    asio::steady_timer timer(io_, time);
    co_await timer.async_wait(asio::use_awaitable);
    co_return true;
  }
  std::string program_output(const std::vector<std::string>& words) {
    Program program("ditfleet", words);
    EXPECT_EQ(program.wait(), 0) << program.err();
    return program.out();
  }

  std::unique_ptr<Program> coordinator_;
  std::string url_;
};

double at(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<std::size_t>(part * static_cast<double>(values.size())))];
}

TEST_F(CapacityTest, the_simulated_latencies_are_those_that_were_observed) {
  constexpr int kJobs = 240, kWorkers = 3;
  constexpr double kLoad = 0.7;
  std::mt19937 random(7);  // NOLINT: the same jobs in every run
  const auto unit = [&] { return (static_cast<double>(random()) + 0.5) / 4294967296.0; };
  std::vector<std::chrono::milliseconds> runs;
  std::vector<bool> large;
  double work_ms = 0;
  for (int i = 0; i < kJobs; ++i) {
    large.push_back(unit() < 0.5);
    runs.emplace_back(static_cast<int>((large.back() ? 300 : 100) + 200 * unit()));
    work_ms += static_cast<double>(runs.back().count());
  }
  const double mean_gap_ms = work_ms / kJobs / kWorkers / kLoad;

  coordinate();
  std::vector<std::unique_ptr<NullWorker>> workers;
  for (int w = 0; w < kWorkers; ++w) {
    NullWorker::Options options{.name = "w" + std::to_string(w)};
    options.run_of = [&](const queue::UnitRef& ref) { return runs[std::stoul(ref.job.substr(1))]; };
    workers.push_back(std::make_unique<NullWorker>(io_, server_.endpoint(), options));
  }
  ASSERT_TRUE(until([&] {
    const auto known = wait(client_->workers(soon()));
    return known && known->size() == kWorkers;
  }));
  auto next = std::chrono::steady_clock::now() + 500ms;  // the scheduler reads the registry
  for (int i = 0; i < kJobs; ++i) {
    next += std::chrono::microseconds(static_cast<std::int64_t>(-std::log(unit()) * mean_gap_ms * 1000));
    wait(nap(std::chrono::duration_cast<std::chrono::microseconds>(next - std::chrono::steady_clock::now())));
    auto job = submission("j" + std::to_string(i));
    job.spec = large[static_cast<std::size_t>(i)]
                   ? R"({"model":"tiny","prompt":"x","seed":1,"width":64,"height":64,"num_inference_steps":4})"
                   : R"({"model":"tiny","prompt":"x","seed":1,"width":32,"height":32,"num_inference_steps":4})";
    submit(job);
  }
  ASSERT_TRUE(until([&] {
    const auto depth = wait(client_->depth(soon()));
    return depth && depth->queued_jobs == 0 && depth->admitted_jobs == 0;
  }));
  std::vector<double> observed;
  for (int i = 0; i < kJobs; ++i) {
    const auto record = wait(client_->job("j" + std::to_string(i), "", soon()));
    ASSERT_TRUE(record.ok() && record->state == job::State::kSucceeded) << i;
    observed.push_back(static_cast<double>(record->ended_ms - record->created_ms) / 1e3);
  }
  // Entries are appended once a second.
  ASSERT_TRUE(until([&] { return redis({"XLEN", queue::Keys(0).history()}).integer == kJobs; }, 10s));

  const auto page = wait(client_->history("0", 1000, soon()));
  ASSERT_TRUE(page.ok());
  ASSERT_EQ(page->jobs.size(), static_cast<std::size_t>(kJobs));
  for (const auto& job : page->jobs) {
    EXPECT_EQ(job.state, job::State::kSucceeded);
    EXPECT_EQ(job.attempts, 1);
    EXPECT_EQ(job.tenant, "default");
    EXPECT_THAT(job.worker, HasSubstr("w"));
    EXPECT_GE(job.run_ms, 95);
    EXPECT_GE(job.total_ms, job.run_ms);
  }

  const std::string file = ::testing::TempDir() + "capacity_trace.csv";
  Program exported("ditfleet", {"history", "export", "--url", url_, "--from", "-1h", "-o", file});
  EXPECT_EQ(exported.wait(), 0) << exported.err();
  EXPECT_THAT(exported.err(), HasSubstr("240 jobs with 240 units; omitted: 0 that did not succeed, 0 without"));
  const auto trace = simulation::read_trace(file);
  const auto costs = simulation::read_cost_table(source_path("tests/sim/h200.json"));
  ASSERT_TRUE(trace.ok() && costs.ok());
  const auto sim = simulation::simulate(*trace, *costs, {.workers = kWorkers, .warm_up = 0});
  ASSERT_TRUE(sim.ok());
  const auto figure = [&](const char* name) { return sim->figure(name); };
  std::printf("observed p50 %.3f s, p95 %.3f s; simulated p50 %.3f s, p95 %.3f s\n", at(observed, .50),
              at(observed, .95), figure("latency_p50"), figure("latency_p95"));
  EXPECT_NEAR(figure("latency_p50"), at(observed, .50), 0.10 * at(observed, .50));
  EXPECT_NEAR(figure("latency_p95"), at(observed, .95), 0.15 * at(observed, .95));

  // With the observed p95 and 15 % as the objective, the fleet that ran is enough.
  const auto slo = "p95=" + std::to_string(static_cast<int>(at(observed, .95) * 1150)) + "ms";
  const auto capacity = parse_json(program_output({"capacity", "--url", url_, "--slo", slo, "--json"}));
  ASSERT_TRUE(capacity.ok());
  const auto& fleet = capacity->at("kinds").at(0).at("fleet");
  std::printf("capacity for %s: %s\n", slo.c_str(), json::serialize(*capacity).c_str());
  EXPECT_LE(fleet.at("workers").as_int64(), kWorkers);
  EXPECT_TRUE(fleet.at("meets").as_bool());
}

TEST_F(CapacityTest, the_history_is_small_and_bounded) {
  options_.history_ms = 3'600'000;
  options_.history_jobs = 12'000;
  queue::Client client(connection_, options_);
  std::vector<queue::HistoryJob> jobs(500, {.created_ms = 1'763'726'400'000,
                                            .total_ms = 8321,
                                            .run_ms = 3456,
                                            .tenant = "customer-17",
                                            .class_key = "flux-dev/1024x1024x1/embedded/512/bf16",
                                            .worker = "gpu-host-12.3",
                                            .adapter = std::string(64, 'a'),
                                            .steps = 28,
                                            .units = 1,
                                            .attempts = 1});
  const auto key = queue::Keys(0).history();
  const auto append = [&](int batches) {
    for (int b = 0; b < batches; ++b) {
      for (auto& job : jobs) job.created_ms += 137, job.run_ms = 3000 + job.created_ms % 997;
      ASSERT_TRUE(wait(client.append_history(jobs, unix_ms(), soon())).ok());
    }
  };
  append(20);
  ASSERT_EQ(redis({"XLEN", key}).integer, 10'000);
  const auto bytes = redis({"MEMORY", "USAGE", key, "SAMPLES", "0"}).integer / 10'000;
  std::printf("history: %lld bytes per job\n", static_cast<long long>(bytes));
  EXPECT_LT(bytes, 300);
  append(10);
  EXPECT_LE(redis({"XLEN", key}).integer, 12'500) << "trimmed by number, in whole nodes of the stream";

  std::string after = "0";
  std::size_t read = 0;
  do {
    const auto page = wait(client.history(after, 1000, soon()));
    ASSERT_TRUE(page.ok());
    read += page->jobs.size();
    after = page->next_cursor;
    if (!page->jobs.empty()) {
      EXPECT_EQ(page->jobs[0].adapter, std::string(12, 'a'));
    }
  } while (!after.empty());
  EXPECT_EQ(static_cast<std::int64_t>(read), redis({"XLEN", key}).integer);
  EXPECT_EQ(wait(client.history("x", 10, soon())).error().param, "after");

  options_.history_ms = 1;  // what is older than a millisecond goes
  queue::Client strict(connection_, options_);
  wait(nap(20ms));
  for (int call = 0; call < 2; ++call)  // a call of XTRIM removes at most 10,000 entries
    ASSERT_TRUE(wait(strict.append_history(std::span(jobs).first(1), unix_ms(), soon())).ok());
  EXPECT_LE(redis({"XLEN", key}).integer, 500) << "trimmed by age";
}

}  // namespace
}  // namespace ditfleet::testing
