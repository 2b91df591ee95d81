// The whole scheduler, against a model of Redis.
#include <algorithm>
#include <memory>

#include "coordinator/scheduling/placement/earliest_finish_policy.h"
#include "tests/unit/coordinator/scheduling/scheduler_fixture.h"

namespace ditfleet::scheduling {
namespace {

TEST_F(SchedulerTest, a_job_is_admitted_assigned_and_ends) {
  workers({"a"});
  submit("j");
  ASSERT_EQ(store.assignments.size(), 1u);
  EXPECT_EQ(owner_of("j"), "a:1");
  store.start({"j", 0}, now);
  now += 100 * kMs;
  store.finish({"j", 0}, now);
  settle();
  EXPECT_EQ(scheduler->stats().jobs, 0u);
  EXPECT_GT(time_of("default"), 0);
}

TEST_F(SchedulerTest, a_job_is_assigned_with_its_admission) {
  workers({"a"});
  scheduler->on_intake(std::vector{entry("j")}, now);
  auto actions = scheduler->decide(now);
  ASSERT_EQ(actions.admit.size(), 1u);
  ASSERT_EQ(actions.assign.size(), 1u);
  store.perform(actions, *scheduler, now);
  settle();  // the events of both change nothing any more
  EXPECT_EQ(store.assignments.size(), 1u);
  EXPECT_FALSE(scheduler->wants_audit());

  // A plain entry may turn out to be another name of a job: its admission is waited for.
  auto plain = entry("x-2-0");
  plain.raw = true;
  scheduler->on_intake(std::vector{plain}, now);
  actions = scheduler->decide(now);
  EXPECT_EQ(actions.admit.size(), 1u);
  EXPECT_TRUE(actions.assign.empty());
}

TEST_F(SchedulerTest, an_admission_that_failed_takes_its_assignment_back) {
  workers({"a"});
  const auto job = entry("j");
  scheduler->on_intake(std::vector{job}, now);
  auto actions = scheduler->decide(now);
  actions.admit.clear();  // Redis is over its memory limit
  store.perform(actions, *scheduler, now);
  EXPECT_TRUE(scheduler->wants_audit());
  now += kMs;
  scheduler->begin_audit();
  scheduler->audit(store.views(), now);
  EXPECT_EQ(scheduler->stats().jobs, 0u);
  scheduler->on_intake(std::vector{job}, now);  // read a second time
  settle();
  EXPECT_EQ(owner_of("j"), "a:1");
  EXPECT_EQ(store.assignments.size(), 1u);
}

TEST_F(SchedulerTest, bad_entries_are_rejected_with_the_reason) {
  submit("unknown", R"({"model":"nope","prompt":"x"})");
  submit("broken", R"({"model":)");
  submit("size", spec(R"("width":100)"));
  ASSERT_EQ(store.rejected.size(), 3u);
  EXPECT_EQ(store.rejected[0].error.code, Code::kNotFound);
  EXPECT_NE(store.rejected[0].error.message.find("tiny"), std::string::npos) << store.rejected[0].error.message;
  EXPECT_EQ(store.rejected[1].error.code, Code::kInvalidArgument);
  EXPECT_EQ(store.rejected[2].error.code, Code::kInvalidArgument);
  EXPECT_EQ(scheduler->stats().jobs, 0u);

  queue::IntakeEntry entry;
  entry.entry_id = "9-1";
  entry.id = "x-9-1";
  entry.raw = true;
  entry.problem = "the entry has no field named spec";
  scheduler->on_intake(std::vector{entry}, now);
  settle();
  ASSERT_EQ(store.rejected.size(), 4u);
  EXPECT_EQ(store.rejected[3].error.message, entry.problem);
  EXPECT_TRUE(store.rejected[3].raw);
}

TEST_F(SchedulerTest, without_a_worker_for_the_model_a_job_waits_ready) {
  submit("j");
  EXPECT_EQ(scheduler->stats().ready, 1u);
  EXPECT_TRUE(store.assignments.empty());
  now += 100'000 * kMs;
  workers({"a"});
  settle();
  EXPECT_EQ(owner_of("j"), "a:1");
}

TEST_F(SchedulerTest, four_images_spread_over_two_idle_workers) {
  workers({"a", "b"});
  submit("j", spec(R"("n":4)"));
  std::map<std::string, int> count;
  for (int i = 0; i < 4; ++i) ++count[owner_of("j", i)];
  EXPECT_EQ(count["a:1"], 2);
  EXPECT_EQ(count["b:1"], 2);
}

TEST_F(SchedulerTest, no_worker_holds_more_than_the_lookahead) {
  workers({"a"});
  submit("j", spec(R"("n":5)"));
  EXPECT_EQ(store.assignments.size(), 2u);
  store.start({"j", 0}, now);
  settle();
  EXPECT_EQ(store.assignments.size(), 2u);
  store.finish({"j", 0}, now += 50 * kMs);
  settle();
  EXPECT_EQ(store.assignments.size(), 3u);
}

TEST_F(SchedulerTest, units_that_a_silent_worker_has_not_started_go_to_another) {
  workers({"a"});
  submit("j", spec(R"("n":2)"));
  store.start({"j", 0}, now);
  settle();
  auto silent = worker("a");
  now += 4'000 * kMs;
  scheduler->on_workers({silent, worker("b")}, now);
  settle();
  EXPECT_EQ(store.revoked, (std::vector<queue::UnitRef>{{"j", 1}}));
  EXPECT_EQ(owner_of("j", 1), "b:1");
  EXPECT_EQ(owner_of("j", 0), "a:1");         // running, until its lease lapses
  store.lapse({"j", 0}, now += 1'000 * kMs);  // by the reaper
  settle();
  EXPECT_EQ(owner_of("j", 0), "") << "both were lost with their worker and run alone";
  store.finish({"j", 1}, now);
  settle();
  EXPECT_EQ(owner_of("j", 0), "b:1");
}

TEST_F(SchedulerTest, a_draining_worker_gets_no_unit_and_loses_those_not_started) {
  workers({"a"});
  submit("j", spec(R"("n":2)"));
  scheduler->on_workers({worker("a", "draining")}, now);
  settle();
  EXPECT_EQ(store.revoked.size(), 2u);
  EXPECT_EQ(scheduler->stats().ready, 2u);
}

TEST_F(SchedulerTest, a_unit_behind_a_long_one_moves_to_a_worker_that_became_idle) {
  workers({"a"});
  submit("long", spec(R"("num_inference_steps":200)"));
  submit("short", spec(R"("num_inference_steps":20)"));
  store.start({"long", 0}, now);
  settle();
  EXPECT_EQ(owner_of("short"), "a:1");
  now += 500 * kMs;
  workers({"a", "b"});
  settle();
  EXPECT_EQ(store.revoked, (std::vector<queue::UnitRef>{{"short", 0}}));
  EXPECT_EQ(owner_of("short"), "b:1");
}

TEST_F(SchedulerTest, tenants_share_by_cost) {
  workers({"a"});
  for (int i = 0; i < 60; ++i) submit("flood" + std::to_string(i), spec(R"("num_inference_steps":8)"), "flood");
  for (int i = 0; i < 60; ++i) submit("late" + std::to_string(i), spec(R"("num_inference_steps":8)"), "late");
  std::map<char, int> served;
  for (int i = 0; i < 40; ++i) {
    for (const auto& [ref, view] : std::map(store.open)) {
      if (view.state != job::State::kAssigned) continue;
      store.start(ref, now);
      store.finish(ref, now += 10 * kMs);
      ++served[ref.job[0]];
    }
    settle();
  }
  EXPECT_NEAR(served['f'], served['l'], 4);
  EXPECT_GT(served['l'], 30);
}

TEST_F(SchedulerTest, canceled_and_expired_units_leave_the_queue) {
  submit("j", spec(R"("n":3)"));
  store.finish({"j", 0}, now, "canceled");
  settle();
  EXPECT_EQ(scheduler->stats().ready, 2u);
  store.finish({"j", 1}, now, "expired");
  store.finish({"j", 2}, now, "expired");
  settle();
  EXPECT_EQ(scheduler->stats().jobs, 0u);
}

TEST_F(SchedulerTest, a_unit_past_its_deadline_is_not_assigned) {
  auto late = entry("j");
  late.deadline_ms = now / 1000 + 10;
  scheduler->on_intake(std::vector{late}, now);
  settle();
  now += 20 * kMs;
  workers({"a"});
  settle();
  EXPECT_TRUE(store.assignments.empty());
  store.finish({"j", 0}, now, "expired");
  settle();
  EXPECT_EQ(scheduler->stats().jobs, 0u);
  submit("k");
  EXPECT_EQ(owner_of("k"), "a:1");
}

TEST_F(SchedulerTest, a_retry_waits_for_its_time) {
  workers({"a"});
  submit("j");
  store.start({"j", 0}, now);
  settle();
  store.event({"j", 0}, "ready", now, {{"not_before_ms", std::to_string(now / 1000 + 500)}, {"reason", "retry"}});
  settle();
  EXPECT_EQ(scheduler->stats().delayed, 1u);
  EXPECT_EQ(store.assignments.size(), 1u);
  now += 500 * kMs;
  store.ready({"j", 0}, now);
  settle();
  EXPECT_EQ(store.assignments.size(), 2u);
}

TEST_F(SchedulerTest, a_revoked_unit_is_not_charged) {
  workers({"a"});
  submit("j");
  EXPECT_GT(time_of("default"), 0);
  scheduler->on_workers({worker("a", "draining")}, now);
  settle();
  EXPECT_EQ(time_of("default"), 0);
}

TEST_F(SchedulerTest, deadlines_that_cannot_be_met_are_rejected_once_runs_were_observed) {
  workers({"a"});
  submit("hopeful", spec(R"("deadline_ms":1)"));  // no run observed: a prior rejects nothing
  EXPECT_TRUE(store.rejected.empty());
  store.start({"hopeful", 0}, now);
  store.finish({"hopeful", 0}, now += 900 * kMs);
  settle();
  submit("late", spec(R"("deadline_ms":100)"));
  ASSERT_EQ(store.rejected.size(), 1u);
  EXPECT_EQ(store.rejected[0].error.code, Code::kResourceExhausted);
  submit("fine", spec(R"("deadline_ms":5000)"));
  EXPECT_EQ(store.rejected.size(), 1u);
}

// Counts the calls of the service's policy.
class CountingPolicy final : public RoutingPolicy {
 public:
  Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) override {
    ++calls;
    return inner_.choose(fleet, costs, request, now_us);
  }
  std::int64_t due_after_us(std::int64_t run_us) const override { return inner_.due_after_us(run_us); }
  std::int64_t penalty_us(const AdapterNeed& need) const override { return inner_.penalty_us(need); }
  Eviction eviction() const override { return inner_.eviction(); }
  int calls = 0;

 private:
  EarliestFinishPolicy inner_{{}};
};

// Ten thousand units of forty shapes wait and one worker has capacity.
TEST_F(SchedulerTest, a_decision_routes_few_of_many_lanes) {
  const auto policy = std::make_shared<CountingPolicy>();
  SchedulerOptions options;
  options.catalogue = catalogue();
  options.new_nonce = [this] { return "n" + std::to_string(++nonces); };
  options.routing = policy;
  scheduler = std::make_unique<Scheduler>(options);
  std::vector<queue::WorkerInfo> infos;
  for (int i = 0; i < 1'000; ++i) infos.push_back(worker("w" + std::to_string(i)));
  scheduler->on_workers(infos, now);
  std::vector<queue::IntakeEntry> intake;
  for (int i = 0; i < 12'000; ++i) {
    intake.push_back(entry("j" + std::to_string(i), spec("\"width\":" + std::to_string(128 + 16 * (i % 40))),
                           "t" + std::to_string(i % 50)));
  }
  scheduler->on_intake(intake, now);
  settle();  // 2,000 are assigned, 10,000 wait
  ASSERT_EQ(scheduler->stats().ready, 10'000u);
  const auto before = store.assignments.size();
  constexpr int kRounds = 500;
  int most = 0;
  for (int i = 0; i < kRounds; ++i) {
    const auto ref = store.assignments[static_cast<std::size_t>(i)].first;
    store.finish(ref, now += kMs, "canceled");
    for (const auto& event : std::exchange(store.events, {})) scheduler->on_event(event, now);
    const int calls = policy->calls;
    store.perform(scheduler->decide(now), *scheduler, now);
    most = std::max(most, policy->calls - calls);
  }
  ASSERT_EQ(store.assignments.size() - before, static_cast<std::size_t>(kRounds));
  EXPECT_LE(most, 16 + 1) << "lanes that may wait, and the one that is assigned";
}

}  // namespace
}  // namespace ditfleet::scheduling
