// Missed and late events: audits, restarts, workers that return.
#include <memory>
#include <random>

#include "tests/unit/coordinator/scheduling/scheduler_fixture.h"

namespace ditfleet::scheduling {
namespace {

TEST_F(SchedulerTest, an_audit_corrects_a_refused_assignment) {
  workers({"a"});
  store.open.clear();
  submit("j");
  store.open.at({"j", 0}).owner = "somebody:9";  // another leader assigned it first
  store.open.at({"j", 0}).nonce = "theirs";
  scheduler->on_assign_refused({"j", 0}, "n1", now);
  EXPECT_TRUE(scheduler->wants_audit());
  now += 10 * kMs;
  scheduler->begin_audit();
  scheduler->audit(store.views(), now);
  EXPECT_FALSE(scheduler->wants_audit());
  EXPECT_EQ(scheduler->stats().held, 1u);
  store.open.clear();
  now += 10 * kMs;
  scheduler->begin_audit();
  scheduler->audit(store.views(), now);
  EXPECT_EQ(scheduler->stats().jobs, 0u);
}

TEST_F(SchedulerTest, an_audit_ignores_units_that_changed_after_it_was_requested) {
  workers({"a"});
  scheduler->begin_audit();
  now += kMs;
  submit("j");
  scheduler->audit({}, now);
  EXPECT_EQ(scheduler->stats().held, 1u);
}

TEST_F(SchedulerTest, an_audit_corrects_what_changed_before_the_clock_was_set_back) {
  workers({"a"});
  submit("j");
  scheduler->begin_audit();
  scheduler->audit({}, now -= 10'000 * kMs);
  EXPECT_EQ(scheduler->stats().jobs, 0u);
}

// The audit is requested between the arrival and the admission of a job, and its result comes after the admission.
TEST_F(SchedulerTest, an_audit_requested_before_an_admission_does_not_end_the_job) {
  for (const std::string id : {"1", "3"}) {
    scheduler->on_intake(std::vector{entry(id, spec("\"n\":" + id))}, now);
    now += 1;
    scheduler->begin_audit();
    const auto seen = store.views();
    now += 1;
    settle();  // no worker yet: it waits
    scheduler->audit(seen, ++now);
    EXPECT_NE(scheduler->waits_for({id, 0}, now), "");
  }
  workers({"w"});
  settle();
  EXPECT_EQ(owner_of("1"), "w:1");
}

// The units are read page by page: a job may end between its page and the last one.
TEST_F(SchedulerTest, an_audit_does_not_bring_back_a_job_that_ended_while_it_was_read) {
  workers({"a"});
  submit("j");
  submit("k");
  now += kMs;
  scheduler->begin_audit();
  const auto seen = store.views();
  store.start({"j", 0}, now += kMs);
  store.finish({"j", 0}, now += kMs);
  settle();
  scheduler->audit(seen, ++now);
  EXPECT_EQ(scheduler->stats().jobs, 1u);
  EXPECT_EQ(scheduler->stats().held, 1u);
}

// A replica that lagged has become the primary: it does not know that a unit ended.
TEST_F(SchedulerTest, a_unit_whose_end_redis_has_lost_runs_again) {
  workers({"a"});
  submit("j", spec(R"("n":2)"));
  store.start({"j", 0}, now);
  settle();
  const auto lagging = store.open;
  store.finish({"j", 0}, now += kMs);
  settle();
  store.open = lagging;
  now += kMs;
  scheduler->begin_audit();
  scheduler->audit(store.views(), now);
  EXPECT_EQ(scheduler->stats().held, 2u);
  store.lapse({"j", 0}, now += kMs);
  for (const int unit : {1, 0}) {  // the unit that was lost with a worker runs alone
    settle();
    EXPECT_EQ(owner_of("j", unit), "a:1");
    store.start({"j", unit}, now);
    store.finish({"j", unit}, now += kMs);
  }
  settle();
  EXPECT_EQ(scheduler->stats().jobs, 0u);
}

TEST_F(SchedulerTest, an_ended_unit_that_becomes_ready_requests_an_audit) {
  workers({"a"});
  submit("j", spec(R"("n":2)"));
  store.start({"j", 0}, now);
  settle();
  store.finish({"j", 0}, now += kMs);
  settle();
  EXPECT_FALSE(scheduler->wants_audit());
  scheduler->on_event({.job = "j", .type = "ready", .unit = 0, .fields = {{"reason", "lease lapsed"}}}, now);
  EXPECT_TRUE(scheduler->wants_audit());
}

// Redis has lost the admission of a job whose unit is held: the job is admitted again while an audit is read.
TEST_F(SchedulerTest, a_held_unit_that_is_admitted_again_is_assigned_again) {
  workers({"a"});
  submit("j");
  now += kMs;
  scheduler->begin_audit();
  auto& view = store.open.at({"j", 0});
  view.state = job::State::kReady;
  view.owner.clear();
  view.nonce.clear();
  scheduler->on_event({.job = "j", .type = "ready", .unit = 0, .at_ms = now / 1000}, ++now);
  scheduler->audit(store.views(), ++now);
  settle();
  EXPECT_EQ(owner_of("j"), "a:1");
  EXPECT_EQ(store.assignments.size(), 2u);
}

// The units are read before the job is admitted again.
TEST_F(SchedulerTest, a_held_unit_that_is_missing_is_looked_for_again) {
  workers({"a"});
  submit("j");
  auto& view = store.open.at({"j", 0});
  view.state = job::State::kReady;
  view.owner.clear();
  view.nonce.clear();
  scheduler->begin_audit();
  scheduler->on_event({.job = "j", .type = "ready", .unit = 0, .at_ms = now / 1000}, ++now);
  scheduler->audit({}, ++now);
  ASSERT_TRUE(scheduler->wants_audit());
  scheduler->begin_audit();
  scheduler->audit(store.views(), ++now);
  settle();
  EXPECT_EQ(owner_of("j"), "a:1");
}

// A unit that was paused, which Redis has lost as well.
TEST_F(SchedulerTest, a_paused_unit_that_is_admitted_again_is_assigned) {
  submit("j");
  scheduler->on_event(
      {.job = "j", .type = "ready", .unit = 0, .fields = {{"reason", "paused"}, {"not_before_ms", "4102444800000"}}},
      now);
  workers({"a"});
  scheduler->begin_audit();
  scheduler->on_event({.job = "j", .type = "ready", .unit = 0, .at_ms = now / 1000}, ++now);
  EXPECT_TRUE(scheduler->wants_audit()) << "this one may have read the units before";
  scheduler->audit(store.views(), ++now);
  settle();
  EXPECT_EQ(owner_of("j"), "a:1");
}

TEST_F(SchedulerTest, an_audit_does_not_answer_a_request_that_came_while_it_was_read) {
  scheduler->begin_audit();
  scheduler->on_event({.job = "ghost", .type = "ready", .unit = 0}, ++now);
  scheduler->audit({}, ++now);
  EXPECT_TRUE(scheduler->wants_audit());
}

TEST_F(SchedulerTest, an_unknown_unit_in_the_feed_requests_an_audit) {
  scheduler->on_event({.job = "ghost", .type = "ready", .unit = 0}, now);
  EXPECT_TRUE(scheduler->wants_audit());
}

TEST_F(SchedulerTest, after_a_restart_silent_workers_keep_their_units_for_the_grace) {
  workers({"a"});
  submit("j", spec(R"("n":2)"));
  const auto silent = worker("a");
  now += 60'000 * kMs;  // Redis was down
  scheduler = make();
  scheduler->rebuild(store.views(), {}, {silent}, 5'000, now);
  scheduler->on_workers({silent, worker("b")}, now += 1'000 * kMs);
  settle();
  EXPECT_TRUE(store.revoked.empty());
  EXPECT_EQ(owner_of("j", 0), "a:1");
  scheduler->on_workers({silent, worker("b")}, now += 5'000 * kMs);
  settle();
  EXPECT_EQ(store.revoked.size(), 2u);
  EXPECT_EQ(owner_of("j", 0), "b:1");
}

// A worker gets a unit just as it deregisters, and the coordinator restarts before it notices.
TEST_F(SchedulerTest, after_a_restart_units_of_a_worker_that_is_gone_move_after_the_grace) {
  workers({"a"});
  submit("j", spec(R"("n":2)"));
  store.start({"j", 0}, now);
  settle();
  scheduler = make();
  scheduler->rebuild(store.views(), {}, {}, 5'000, now);
  workers({"b"});
  settle();
  EXPECT_EQ(store.revoked.size(), 0u) << "Redis may have been away for longer than the registry keeps a worker";
  now += 5'001 * kMs;
  workers({"b"});
  settle();
  ASSERT_EQ(store.revoked.size(), 1u);
  EXPECT_EQ(owner_of("j", 1), "b:1");
  EXPECT_EQ(owner_of("j", 0), "a:1") << "it keeps a started unit until the lease lapses";
}

TEST_F(SchedulerTest, a_paused_unit_frees_its_worker_and_is_no_work) {
  workers({"a"});
  submit("j");
  store.start({"j", 0}, now);
  settle();
  ASSERT_EQ(owner_of("j"), "a:1");
  store.pause({"j", 0}, now);
  settle();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(owner_of("j"), "");
    EXPECT_EQ(scheduler->waits_for({"j", 0}, now), "its job to be resumed");
    for (const auto& [name, model] : scheduler->forecast(0, now).models)
      EXPECT_EQ(std::pair(model.units, model.backlog_us), std::pair(std::int64_t{0}, std::int64_t{0})) << name;
    scheduler = make();
    scheduler->rebuild(store.views(), {}, {}, 5'000, now);
    workers({"a"});
    settle();
  }
  store.open.at({"j", 0}).not_before_ms = 0;
  store.ready({"j", 0}, now, "resumed");
  settle();
  EXPECT_EQ(owner_of("j"), "a:1");
}

TEST_F(SchedulerTest, a_worker_that_returns_a_unit_gets_none_before_it_reports_ready) {
  workers({"a"});
  submit("j");
  ASSERT_EQ(owner_of("j"), "a:1");
  const auto before = worker("a");
  now += 10 * kMs;
  store.ready({"j", 0}, now, "handed back");
  settle();
  EXPECT_EQ(owner_of("j"), "") << "the worker would return it again";
  scheduler->on_workers({before}, now);
  settle();
  EXPECT_EQ(owner_of("j"), "") << "this heartbeat is older";
  now += 10 * kMs;
  workers({"a"});
  settle();
  EXPECT_EQ(owner_of("j"), "a:1");
}

// A scheduler that was rebuilt from the stored state decides as one that saw all events. No runs are observed here: a
// restart forgets only what was learnt from observed runs.
TEST_F(SchedulerTest, a_rebuilt_scheduler_makes_the_same_decisions) {
  std::mt19937 random(11);
  const std::vector<std::string> names{"a", "b", "c"};
  workers(names);
  for (int i = 0; i < 300; ++i) {
    now += static_cast<std::int64_t>(random() % 40) * kMs;
    const auto action = random() % 3;
    if (action < 2) {
      submit("j" + std::to_string(1000 + i),
             spec("\"n\":" + std::to_string(1 + random() % 3) + ",\"priority\":" + std::to_string(random() % 3) +
                  ",\"num_inference_steps\":" + std::to_string(1 + random() % 30) +
                  ",\"width\":" + std::to_string(128 << random() % 3)),
             "t" + std::to_string(random() % 4));
    } else if (!store.open.empty()) {
      const auto ref = std::next(store.open.begin(), static_cast<long>(random() % store.open.size()))->first;
      store.finish(ref, now, "canceled");
      settle();
    }
  }
  ASSERT_GT(scheduler->stats().ready, 50u);
  now += kMs;
  workers(names);
  settle();

  auto rebuilt = make();
  std::vector<queue::WorkerInfo> infos;
  for (const auto& name : names) infos.push_back(worker(name));
  rebuilt->rebuild(store.views(), scheduler->virtual_times(), infos, 0, now);
  EXPECT_EQ(rebuilt->stats().ready, scheduler->stats().ready);
  EXPECT_EQ(rebuilt->stats().held, scheduler->stats().held);
  EXPECT_TRUE(rebuilt->decide(now).empty());

  // Units end in the same order for both; both must assign the same unit next.
  Store other = store;
  int compared = 0;
  for (int i = 0; i < 200 && !store.open.empty(); ++i) {
    now += 20 * kMs;
    std::optional<queue::UnitRef> held;
    for (const auto& [ref, view] : store.open) {
      if (view.state == job::State::kAssigned && (!held || random() % 2)) held = ref;
    }
    if (!held) break;
    for (auto* side : {&store, &other}) side->finish(*held, now, "canceled");
    settle();
    std::swap(store, other);
    std::swap(scheduler, rebuilt);
    settle();
    std::swap(store, other);
    std::swap(scheduler, rebuilt);
    ASSERT_EQ(store.assignments.size(), other.assignments.size()) << "after " << i;
    if (store.assignments.empty()) continue;
    ASSERT_EQ(store.assignments.back().first, other.assignments.back().first) << "after " << i;
    ++compared;
  }
  EXPECT_GT(compared, 100);
}

// Stored virtual times are up to a second old. A tenant that began to wait within that second starts among the waiting
// ones, whatever its time was before.
TEST_F(SchedulerTest, a_tenant_that_returns_after_the_times_were_stored_has_neither_credit_nor_debt) {
  const auto run = [this](const queue::UnitRef& ref) {
    store.start(ref, now);
    settle();
    now += 100 * kMs;
    store.finish(ref, now);
    settle();
  };
  const auto submit_some = [this](const std::string& tenant) {
    for (int i = 0; i < 20; ++i) submit(tenant + std::to_string(i), spec("\"n\":1"), tenant);
  };
  for (const bool beside : {false, true}) {
    for (const std::string back : {"little", "much"}) {
      const std::string other = back == "little" ? "much" : "little";
      SCOPED_TRACE(back + (beside ? " comes back while the other waits" : " and the other come back"));
      store = {};
      scheduler = make();
      workers({"a"});
      for (const std::string tenant : {"little", "much"}) {
        for (int i = 0; i < (tenant == "little" ? 1 : 40); ++i) {
          submit("past", spec("\"n\":1"), tenant);
          run({"past", 0});
        }
      }
      ASSERT_GT(time_of("much"), 10 * time_of("little"));
      auto stored = scheduler->virtual_times();
      submit_some(other);
      if (beside) stored = scheduler->virtual_times();
      submit_some(back);
      scheduler = make();
      scheduler->rebuild(store.views(), stored, {worker("a")}, 0, now);
      settle();
      std::map<std::string, int> served;
      for (int i = 0; i < 20; ++i) {
        const auto held =
            std::find_if(store.open.begin(), store.open.end(), [](const auto& u) { return !u.second.owner.empty(); });
        ASSERT_NE(held, store.open.end());
        ++served[held->second.tenant];
        run(held->first);
      }
      EXPECT_NEAR(served[back], 10, 3);
    }
  }
}

}  // namespace
}  // namespace ditfleet::scheduling
