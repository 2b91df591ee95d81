// The fleet simulator on small traces.
#include "coordinator/simulation/simulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "coordinator/simulation/service_gap.h"
#include "coordinator/simulation/worker_model.h"
#include "tests/paths.h"
#include "tests/sim/policies.h"
#include "tests/unit/coordinator/simulation/simulation_fixture.h"

namespace ditfleet::simulation {
namespace {

using ::testing::HasSubstr;

TEST(WorkerModel, LoadsSwapsAndEvictsAsTheCostTableSays) {
  CostTable table = costs();
  table.host_adapter_bytes = 2 * table.adapter_bytes;
  table.adapter_slots = 1;
  WorkerModel worker("w", table);
  const auto unit = [](int i, const char* adapter) {
    return ModelUnit{.ref = {std::to_string(i), 0},
                     .nonce = std::to_string(i),
                     .class_key = "c",
                     .adapter = adapter,
                     .run_us = 1'000'000,
                     .cold_us = 65'200};
  };
  EXPECT_TRUE(worker.is_cold("c"));
  EXPECT_TRUE(worker.take(unit(1, "a"), 0));
  EXPECT_FALSE(worker.is_cold("c"));  // the held unit will warm it
  EXPECT_TRUE(worker.is_cold("d"));
  EXPECT_FALSE(worker.start(0));
  ASSERT_EQ(worker.next_us(), 172'000);
  const auto first = worker.start(172'000);
  ASSERT_TRUE(first);
  EXPECT_TRUE(first->slot_miss);
  EXPECT_TRUE(first->cold_class);
  EXPECT_EQ(first->started_us, 172'000 + 3'670);
  EXPECT_EQ(first->ends_us, 172'000 + 3'670 + 1'000'000 + 65'200);
  EXPECT_TRUE(worker.take(unit(2, "b"), 200'000));  // loads beside the running job
  EXPECT_FALSE(worker.revoke({{"1", 0}, "1"}));     // it runs
  EXPECT_FALSE(worker.start(9'000'000));            // one at a time
  worker.finish(first->ends_us);
  const auto second = worker.start(first->ends_us);
  EXPECT_TRUE(second->slot_miss);
  EXPECT_EQ(second->started_us, first->ends_us + 3'670);  // the one slot was taken until then
  worker.finish(second->ends_us);
  auto third = unit(3, "c");
  third.drop_from_host = {"b"};
  EXPECT_TRUE(worker.take(third, 9'000'000));
  EXPECT_FALSE(worker.take(unit(4, "a"), 9'000'000));  // `b` was evicted, though `a` was used earlier
  EXPECT_TRUE(worker.revoke({{"4", 0}, "4"}));
  EXPECT_EQ(worker.heartbeat(10'000'000).host_adapters.size(), 2u);
}

TEST(ServiceGap, IsTheLeadBeyondTheInitialOne) {
  ServiceGap gap;
  const auto widest = [&] {
    gap.look();
    return gap.widest_us();
  };
  for (int i = 0; i < 4; ++i) gap.queued("a");
  gap.assigned("a", 100);
  gap.assigned("a", 100);
  EXPECT_EQ(widest(), 0);  // alone
  for (int i = 0; i < 4; ++i) gap.queued("b");
  gap.assigned("b", 150);
  gap.assigned("b", 50);  // level
  EXPECT_EQ(widest(), 0);
  gap.assigned("a", 70);
  EXPECT_EQ(widest(), 0);  // within its initial lead
  gap.assigned("b", 300);
  EXPECT_EQ(widest(), 230);
  gap.queued("a");
  gap.returned("b", 300);
  gap.assigned("a", 460);  // `a` leads by 530, of which 200 are its initial lead
  EXPECT_EQ(widest(), 330);
}

TEST(ServiceGap, IgnoresTheOrderOfEventsWithEqualTimestamps) {
  ServiceGap gap;
  for (const auto* tenant : {"a", "b"}) {
    for (int i = 0; i < 9; ++i) gap.queued(tenant);
  }
  for (int i = 0; i < 8; ++i) gap.assigned("a", 100);
  for (int i = 0; i < 7; ++i) gap.assigned("b", 100);
  gap.look();
  EXPECT_EQ(gap.widest_us(), 100);
}

TEST(Simulation, EveryPolicyServesEveryJobAndGivesTheSameFiguresAgain) {
  const auto trace = small_trace();
  for (const auto name : policy_names()) {
    const PolicyOptions policy{.name = std::string(name)};
    const auto first = simulate(trace, costs(), {}, policy);
    ASSERT_TRUE(first.ok()) << name << first.error().message;
    EXPECT_GT(first->figure("latency_p50"), 0.3) << name;
    EXPECT_GE(first->figure("latency_p95"), first->figure("latency_p50")) << name;
    EXPECT_GT(first->figure("utilisation"), 0.3) << name;
    EXPECT_LE(first->figure("utilisation"), 1.0) << name;
    const auto again = simulate(trace, costs(), {}, policy);
    for (const auto& figure : first->figures) {
      if (!figure.metric.starts_with("decision")) {
        EXPECT_EQ(again->figure(figure.metric), figure.value) << name << ' ' << figure.metric;
      }
    }
  }
}

TEST(Simulation, TheUnitOfTheGapIncludesColdClassCosts) {
  auto table = costs();
  table.cold_class_us = 60'000'000;
  const auto report = simulate(small_trace(), table, {.warm_up = 0});
  ASSERT_TRUE(report.ok());
  EXPECT_LE(report->figure("fairness_gap"), 3.0);
}

TEST(Simulation, WithoutObjectivesThereIsNoSuchFigure) {
  auto trace = small_trace();
  EXPECT_FALSE(std::isnan(simulate(trace, costs(), {})->figure("slo_attained")));
  for (auto& job : trace.jobs) job.slo_us = 0;
  EXPECT_TRUE(std::isnan(simulate(trace, costs(), {})->figure("slo_attained")));
}

// In a fleet of four. One of 320 jobs is 0.3 %, so single traces vary more than the mean.
TEST(Simulation, TheServicePolicyLoadsAndSwapsLessThanRoundRobin) {
  double p95 = 0;
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    const auto trace = small_trace(seed);
    const auto router = simulate(trace, costs(), {});
    const auto round_robin = simulate(trace, costs(), {}, {"round_robin", {}});
    EXPECT_LT(router->figure("host_misses"), 0.7 * round_robin->figure("host_misses")) << seed;
    EXPECT_LT(router->figure("slot_misses"), round_robin->figure("slot_misses")) << seed;
    const auto ratio = router->figure("latency_p95") / round_robin->figure("latency_p95");
    EXPECT_LE(ratio, 1.1) << seed;
    p95 += ratio / 8;
  }
  EXPECT_LE(p95, 1.0);
}

TEST(Simulation, TuningTriesTheGridExceptForGivenTunables) {
  const auto tuned = [](PolicyOptions policy) { return simulate_tuned(small_trace(), costs(), {}, policy); };
  EXPECT_THAT(tuned({"llm_d_ladder", {}})->policy, HasSubstr("affinity_weight="));
  EXPECT_EQ(tuned({"llm_d_ladder", {{"affinity_weight", 3.0}}})->policy, "llm_d_ladder,affinity_weight=3");
  EXPECT_EQ(tuned({"finish", {}})->policy, "finish");
}

// The bound of coordinator/scheduling/README.md, plus the errors of predictions and of a cold start.
TEST(Simulation, NoTenantGetsFarAhead) {
  for (std::uint64_t seed = 1; seed <= 9; ++seed) {
    TraceOptions options{.jobs = 1200,
                         .workers = seed % 3 == 0 ? 16 : 8,
                         .adapters = 80,
                         .load = 0.7 + 0.1 * static_cast<double>(seed % 3),
                         .burst = 2,
                         .seed = 1'000 + seed};
    options.steps = seed % 2 == 0 ? std::vector<int>{4, 28} : std::vector<int>{4};
    const auto report = simulate(*generate_trace(options, costs()), costs(), {});
    ASSERT_TRUE(report.ok());
    EXPECT_LE(report->figure("fairness_gap_at_first"), 2.0) << "seed " << options.seed;
    EXPECT_LE(report->figure("fairness_gap"), 2.5) << "seed " << options.seed;
  }
}

// Takes minutes if the gap is computed over all pairs of tenants.
TEST(Simulation, AThousandTenantsMayWait) {
  Trace trace;
  trace.workers = 16;
  for (int i = 0; i < 4000; ++i) {
    trace.jobs.push_back({.at_us = i / 10 * 1000,
                          .tenant = "t" + std::to_string(i % 1000),
                          .width = 1024,
                          .height = 1024,
                          .steps = 4,
                          .adapter = "a" + std::to_string(i * 7 % 50)});
  }
  const auto report = simulate(trace, costs(), {});
  ASSERT_TRUE(report.ok());
  EXPECT_LE(report->figure("fairness_gap"), 2.0);
}

// While every run is cold, predictions are guesses, which must not give a tenant a lead. Single fleets exceed the
// bound.
TEST(Simulation, ColdFleetsGiveNoTenantALead) {
  double gap = 0;
  for (std::uint64_t seed = 920; seed < 940; ++seed) {
    const auto report =
        simulate(*generate_trace({.jobs = 1560, .workers = 16, .burst = 2, .seed = seed}, costs()), costs(), {});
    ASSERT_TRUE(report.ok());
    gap += std::max(report->figure("fairness_gap_at_first"), report->figure("fairness_gap")) / 20;
  }
  EXPECT_LE(gap, 2.0);
}

// The service's policy with its defaults against every baseline, each tuned on the trace.
class Committed : public ::testing::TestWithParam<std::pair<const char*, double>> {};

TEST_P(Committed, AsGoodAsTheBestBaselineInP95AndObjectivesWithFewerLoads) {
  const auto [name, most_loads] = GetParam();
  const auto trace = read_trace(source_path("tests/sim/") + name + ".csv");
  ASSERT_TRUE(trace.ok()) << trace.error().message;
  const auto own = simulate(*trace, costs(), {});
  ASSERT_TRUE(own.ok());
  double best_p95 = 1e9, best_objectives = 0, loads_of_best = 0;
  for (const auto policy : policy_names()) {
    if (policy == "finish") continue;
    const auto baseline = simulate_tuned(*trace, costs(), {}, {std::string(policy), {}});
    ASSERT_TRUE(baseline.ok()) << policy;
    best_objectives = std::max(best_objectives, baseline->figure("slo_attained"));
    if (baseline->figure("latency_p95") >= best_p95) continue;
    best_p95 = baseline->figure("latency_p95");
    loads_of_best = baseline->figure("host_misses");
  }
  EXPECT_LE(own->figure("latency_p95"), best_p95);
  EXPECT_GE(own->figure("slo_attained"), best_objectives);
  EXPECT_LE(own->figure("host_misses"), most_loads * loads_of_best);
  EXPECT_LE(own->figure("fairness_gap"), 2.0);
}

// The loads relative to those of the baseline with the best p95.
INSTANTIATE_TEST_SUITE_P(Traces, Committed,
                         ::testing::Values(std::pair{"steps4", 0.7}, std::pair{"steps28", 0.7},
                                           std::pair{"mixed", 0.7}),
                         [](const auto& info) { return std::string(info.param.first); });

TEST(Simulation, RejectsIncompleteOptions) {
  auto trace = small_trace();
  trace.workers = 0;
  EXPECT_THAT(simulate(trace, costs(), {}).error().message, HasSubstr("--workers"));
  EXPECT_THAT(simulate(small_trace(), costs(), {}, {"x", {}}).error().message, HasSubstr("finish"));
  for (const double part : {std::nan(""), -0.1, 1.0})
    EXPECT_THAT(simulate(small_trace(), costs(), {.warm_up = part}).error().message, HasSubstr("warm-up")) << part;
}

TEST(Simulation, FailsIfTheSchedulerRejectsAJob) {
  auto trace = small_trace();
  trace.jobs[7].adapter = std::string(300, 'n');  // too long
  EXPECT_THAT(simulate(trace, costs(), {}).error().message, HasSubstr("rejects the job number 8: "));
  trace.jobs[7].line = 10;
  EXPECT_THAT(simulate(trace, costs(), {}).error().message, HasSubstr("rejects the job in line 10: "));
}

// Arrivals may be calendar times, with idle years in between.
TEST(Simulation, IdleTimeChangesNoFigureAndTakesNoTime) {
  auto trace = small_trace();
  const auto now = simulate(trace, costs(), {});
  for (auto& job : trace.jobs) job.at_us += 1'763'800'000'000'000;
  const auto later = simulate(trace, costs(), {});
  for (const auto& figure : now->figures) {
    if (!figure.metric.starts_with("decision")) {
      EXPECT_EQ(later->figure(figure.metric), figure.value) << figure.metric;
    }
  }
  trace.jobs.back().at_us += 63'000'000'000'000;
  EXPECT_TRUE(simulate(trace, costs(), {}).ok());
}

}  // namespace
}  // namespace ditfleet::simulation
