// The smallest fleet for an objective, on traces whose answer is known, and traces with observed run times.
#include "coordinator/simulation/capacity.h"

#include <gmock/gmock.h>

#include "coordinator/simulation/simulation.h"
#include "tests/unit/coordinator/simulation/simulation_fixture.h"

namespace ditfleet::simulation {
namespace {

using ::testing::HasSubstr;

// A job every `gap_ms`, each of which runs for `run_ms`.
Trace steady(int jobs, int gap_ms, int run_ms) {
  Trace trace;
  for (int i = 0; i < jobs; ++i) {
    trace.jobs.push_back(
        {.at_us = i * gap_ms * 1000, .tenant = "t", .width = 512, .height = 512, .steps = 4, .run_us = run_ms * 1000});
  }
  return trace;
}

Capacity capacity(const Trace& trace, const std::vector<Objective>& objectives, double speed = 1, int most = 100) {
  const auto found = find_capacity(trace, observed_costs(2), objectives, speed, most);
  EXPECT_TRUE(found.ok()) << (found ? "" : found.error().message);
  return found ? *found : Capacity{.fleet = {}, .one_fewer = {}};
}

TEST(FleetCapacity, OfSteadyArrivalsIsTheirWork) {
  // A new job every second on workers that take 1.6 s: two are enough and never let a job wait.
  const auto trace = steady(400, 1000, 1600);
  const auto found = capacity(trace, {{95, 2.0}});
  EXPECT_TRUE(found.fleet.meets);
  EXPECT_EQ(found.fleet.workers, 2);
  EXPECT_NEAR(found.fleet.p50_s, 1.6, 0.001);
  EXPECT_NEAR(found.fleet.p95_s, 1.6, 0.001);
  EXPECT_NEAR(found.fleet.utilisation, 0.8, 0.01);
  EXPECT_NEAR(found.fleet.gpu_hours, 2 * 400.0 / 3600, 0.002);
  EXPECT_LE(found.load, 1 / 0.8) << "then the workers are always busy";
  EXPECT_GE(found.load, 1.15) << "the waits of cold classes at the start last while there is little idle time";
  ASSERT_TRUE(found.one_fewer);
  EXPECT_FALSE(found.one_fewer->meets);
  EXPECT_GT(found.one_fewer->p50_s, 100) << "the queue grows by 0.6 s with each job";
}

TEST(FleetCapacity, OfJobsThatArriveTogetherIsHowManyMustRunAtOnce) {
  // 12 jobs of 1 s at once: with w workers the last ones end after 12 ÷ w seconds.
  const auto trace = steady(12, 0, 1000);
  EXPECT_EQ(capacity(trace, {{99, 1.0}}).fleet.workers, 12);
  EXPECT_EQ(capacity(trace, {{99, 2.0}}).fleet.workers, 6);
  EXPECT_EQ(capacity(trace, {{99, 3.0}}).fleet.workers, 4);
  EXPECT_EQ(capacity(trace, {{50, 2.0}, {99, 6.0}}).fleet.workers, 4) << "the 7th job must end after two seconds";
}

TEST(FleetCapacity, DependsOnTheSpeedOfTheWorkers) {
  const auto trace = steady(200, 1000, 1600);
  EXPECT_EQ(capacity(trace, {{95, 1.0}}, 2).fleet.workers, 1);
  EXPECT_EQ(capacity(trace, {{95, 3.5}}, 0.5).fleet.workers, 4);
  const auto never = capacity(trace, {{95, 1.0}});
  EXPECT_FALSE(never.fleet.meets) << "a run takes 1.6 s";
  EXPECT_EQ(never.fleet.workers, 100);
  EXPECT_NEAR(never.fleet.p95_s, 1.6, 0.001);
}

TEST(FleetCapacity, ObservedRunsReplaceTheCostTable) {
  auto trace = steady(50, 5000, 700);
  auto table = costs();
  table.adapter_swap_us = table.adapter_resident_us = 0;
  table.adapter_load_bytes_per_s = 1e15;
  const auto report = simulate(trace, table, {.workers = 1, .warm_up = 0});
  ASSERT_TRUE(report.ok());
  EXPECT_NEAR(report->figure("latency_p50"), 0.7, 0.001);
  EXPECT_NEAR(report->figure("latency_p99"), 0.7, 0.001) << "the cold class is part of the observed run";
}

TEST(FleetCapacity, ObjectivesAreAPercentileAndATime) {
  EXPECT_EQ(parse_objective("p95=20s")->percent, 95);
  EXPECT_DOUBLE_EQ(parse_objective("p50=250ms")->seconds, 0.25);
  EXPECT_DOUBLE_EQ(parse_objective("p99=1.5m")->seconds, 90);
  for (const char* text :
       {"", "p95", "p95=", "p95=20", "p90=20s", "p95=s", "p95=-1s", "p95=0s", "p95=1e3s", "p95=2h"}) {
    const auto objective = parse_objective(text);
    ASSERT_FALSE(objective.ok()) << text;
    EXPECT_THAT(objective.error().message, HasSubstr("such as p95=20s"));
  }
  EXPECT_THAT(find_capacity(steady(1, 0, 1), costs(), {}, 1, 10).error().message, HasSubstr("at least one objective"));
  EXPECT_THAT(find_capacity({}, costs(), {{95, 1}}, 1, 10).error().message, HasSubstr("no jobs"));
}

TEST(FleetCapacity, TracesKeepObservedRuns) {
  const auto trace = steady(3, 10, 1900);
  const auto path = ::testing::TempDir() + "observed.csv";
  ASSERT_TRUE(write_trace(trace, path).ok());
  const auto read = read_trace(path);
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_EQ(read->jobs[2].run_us, 1'900'000);
  EXPECT_EQ(read->jobs[2].at_us, 20'000);
  const std::string header = "at_ms,tenant,width,height,steps,adapter,slo_ms,run_ms\n";
  EXPECT_EQ(read_trace(scratch("r1.csv", header + "0,t,512,512,4,,0,x\n")).error().message,
            ::testing::TempDir() + "r1.csv, line 2: run_ms is 'x'; it must be a whole number from 0 to 1000000000");
  EXPECT_THAT(read_trace(scratch("r2.csv", header + "0,t,512,512,4,,0\n")).error().message, HasSubstr("slo_ms,run_ms"));
  EXPECT_EQ(read_trace(scratch("r3.csv", header + "0,t,512,512,4,,0,0\n"))->jobs[0].run_us, 0);
}

}  // namespace
}  // namespace ditfleet::simulation
