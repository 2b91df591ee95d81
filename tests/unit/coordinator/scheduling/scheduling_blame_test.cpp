// Units that were lost with their workers run alone; units avoid workers on which they failed; workers that fail what
// others can do are probed; overdue and stuck workers get nothing.
#include <gmock/gmock.h>

#include <random>

#include "tests/unit/coordinator/scheduling/scheduler_fixture.h"

namespace ditfleet::scheduling {
namespace {

using ::testing::HasSubstr;

class BlameTest : public SchedulerTest {
 protected:
  // Time passes, with heartbeats.
  void after(std::int64_t ms) {
    now += ms * kMs;
    beat();
  }
  void beat() {
    workers(names);
    settle();
  }
  void start(const std::string& job) {
    store.start({job, 0}, now);
    settle();
  }
  void lapse(const std::string& job) {
    store.lapse({job, 0}, now);
    settle();
  }
  void fail(const std::string& job) {
    store.fail({job, 0}, now);
    settle();
  }
  void finish(const std::string& job) {
    store.finish({job, 0}, now);
    settle();
  }
  std::string why(const std::string& job) const { return scheduler->waits_for({job, 0}, now); }
  std::size_t held_by(const std::string& worker) const {
    std::size_t out = 0;
    for (const auto& [ref, view] : store.open) out += view.owner == worker + ":1";
    return out;
  }
  void fill(int jobs, const std::string& prefix = "x") {
    for (int i = 0; i < jobs; ++i) submit(prefix + std::to_string(i));
  }

  std::vector<std::string> names{"a"};
};

TEST_F(BlameTest, with_one_worker_it_drains_runs_the_suspect_alone_and_goes_on) {
  beat();
  submit("p");
  lapse("p");
  ASSERT_EQ(owner_of("p"), "a:1") << "the worker is empty";
  fill(3);
  EXPECT_EQ(owner_of("x0"), "") << "nothing beside the suspect";
  start("p");
  EXPECT_EQ(owner_of("x0"), "");
  lapse("p");
  EXPECT_EQ(owner_of("p"), "a:1");
  finish("p");
  EXPECT_EQ(owner_of("x0"), "a:1");
  EXPECT_EQ(owner_of("x1"), "a:1");

  submit("q");
  finish("x2");  // canceled
  start("x0");
  store.lapse({"x1", 0}, now);
  settle();
  EXPECT_EQ(owner_of("x1"), "");
  EXPECT_EQ(why("x1"), "an empty worker: it runs alone, because a worker was lost with it");
  EXPECT_EQ(owner_of("q"), "") << "the worker drains";
  finish("x0");
  EXPECT_EQ(owner_of("x1"), "a:1");
  EXPECT_EQ(owner_of("q"), "");
  finish("x1");
  EXPECT_EQ(owner_of("q"), "a:1");
}

TEST_F(BlameTest, suspects_take_a_quarter_of_the_workers_and_leave_the_others_alone) {
  names = {"a", "b", "c", "d", "e", "f", "g", "h"};
  beat();
  fill(16);
  for (int i = 0; i < 16; ++i) start("x" + std::to_string(i));
  fill(40, "y");
  for (int i = 0; i < 6; ++i) store.lapse({"x" + std::to_string(i), 0}, now);
  settle();
  std::set<std::string> seen;
  for (int round = 0; round < 200 && !store.open.empty(); ++round) {
    std::size_t suspects = 0, idle = 0;
    for (const auto& name : names) {
      std::size_t here = 0;
      for (const auto& [ref, view] : store.open) {
        if (view.owner != name + ":1" || view.lapses == 0) continue;
        ++here;
        seen.insert(ref.job);
        EXPECT_EQ(held_by(name), 1u) << name << " holds a suspect";
      }
      suspects += here;
      idle += held_by(name) == 0;
    }
    EXPECT_LE(suspects, 2u);
    // One reserved worker at most waits for each suspect; all others work while there is work.
    if (scheduler->ready() > 0) {
      EXPECT_LE(idle, 2u);
    }
    for (const auto& [ref, view] : store.open) {
      if (view.owner.empty()) continue;
      finish(queue::UnitRef(ref).job);
      break;
    }
    after(10);
  }
  EXPECT_EQ(seen.size(), 6u) << "none starves";
  EXPECT_TRUE(store.open.empty());
}

TEST_F(BlameTest, a_suspect_does_not_starve_behind_a_stream_of_units) {
  names = {"a", "b"};
  beat();
  fill(4);
  for (int i = 0; i < 4; ++i) start("x" + std::to_string(i));
  const auto first = owner_of("x0");
  lapse("x0");
  int units = 4;
  for (int round = 0; round < 10 && owner_of("x0").empty(); ++round) {
    for (const auto& [ref, view] : store.open) {
      if (view.owner.empty() || ref.job == "x0") continue;
      finish(queue::UnitRef(ref).job);
      break;
    }
    submit("z" + std::to_string(units++));
    after(100);
  }
  EXPECT_NE(owner_of("x0"), "");
  EXPECT_NE(owner_of("x0"), first) << "it crashed there";
}

TEST_F(BlameTest, a_suspect_of_the_tenant_that_has_had_least_goes_first) {
  beat();
  submit("l", spec(R"("n":1)"), "little");
  for (int i = 0; i < 5; ++i) submit("m" + std::to_string(i), spec(R"("n":1)"), "much");
  for (int i = 0; i < 5; ++i) {
    const auto id = "m" + std::to_string(i);
    store.open.at({id, 0}).lapses = 1;
  }
  store.open.at({"l", 0}).lapses = 1;
  for (auto& [ref, view] : store.open) {
    view.state = job::State::kReady;
    view.owner.clear();
  }
  now += kMs;
  scheduler = make();
  scheduler->rebuild(store.views(), {{"much", 5'000'000}, {"little", 0}}, {worker("a")}, 0, now);
  settle();
  ASSERT_EQ(held_by("a"), 1u);
}

TEST_F(BlameTest, a_unit_avoids_the_worker_that_failed_it_and_waits_for_a_busy_one) {
  names = {"bad", "good"};
  beat();
  fill(60);
  // `good` runs one unit at a time for a second; `bad` fails at once what it gets.
  int failures = 0;
  std::map<std::string, int> failed;
  for (int i = 0; i < 10'000 && !store.open.empty(); ++i) {
    std::optional<std::string> on_good;
    std::vector<std::string> on_bad;
    for (const auto& [ref, view] : store.open) {
      if (view.owner == "good:1" && !on_good) on_good = ref.job;
      if (view.owner == "bad:1") on_bad.push_back(ref.job);
    }
    for (const auto& id : on_bad) {
      start(id);
      ++failures;
      ASSERT_LT(++failed[id], 3) << id << " has used up its attempts";
      fail(id);
    }
    if (i % 10 == 9 && on_good) {
      start(*on_good);
      finish(*on_good);
    }
    after(100);
  }
  EXPECT_TRUE(store.open.empty());
  EXPECT_GE(failures, 3);
  EXPECT_LE(failures, 70);
}

TEST_F(BlameTest, a_unit_that_failed_on_every_worker_may_run_on_any) {
  names = {"a", "b"};
  beat();
  submit("j");
  const auto first = owner_of("j");
  fail("j");
  const auto second = owner_of("j");
  EXPECT_NE(second, first);
  EXPECT_NE(second, "");
  fail("j");
  EXPECT_NE(owner_of("j"), "");
  names = {"a"};
  submit("k");
  finish("j");
  fail("k");
  after(1000);
  EXPECT_EQ(owner_of("k"), "a:1") << "there is no other worker";
}

TEST_F(BlameTest, after_half_a_minute_a_unit_returns_to_a_worker_that_does_not_fail_others) {
  names = {"a", "b"};
  beat();
  fill(4);
  for (int i = 0; i < 4; ++i) start("x" + std::to_string(i));
  std::string on_a;
  for (const auto& [ref, view] : store.open) {
    if (view.owner == "a:1") on_a = ref.job;
  }
  fail(on_a);
  EXPECT_EQ(owner_of(on_a), "");
  for (int i = 0; i < 32; ++i) after(1000);
  EXPECT_EQ(owner_of(on_a), "a:1");
}

TEST_F(BlameTest, a_worker_that_fails_what_others_can_do_is_probed_until_it_succeeds) {
  names = {"bad", "good"};
  beat();
  for (int i = 0; i < 3; ++i) {
    const std::string ids[] = {"j" + std::to_string(i), "k" + std::to_string(i)};
    for (const auto& id : ids) submit(id);
    for (const auto& id : ids) start(id);
    const bool second = owner_of(ids[1]) == "bad:1";
    ASSERT_EQ(held_by("bad"), 1u);
    fail(ids[second]);
    finish(ids[!second]);
    ASSERT_EQ(owner_of(ids[second]), "good:1");
    start(ids[second]);
    finish(ids[second]);
  }
  const auto state = [&] {
    const auto& fleet = scheduler->fleet();
    return fleet.at(fleet.at(0).name == "bad" ? 0 : 1).state;
  };
  EXPECT_EQ(state(), WorkerState::kProbing);
  fill(6);
  EXPECT_EQ(held_by("bad"), 0u);
  EXPECT_EQ(held_by("good"), 2u);
  for (const int pause : {5, 10, 20, 40, 80, 160, 300, 300}) {
    after(pause * 1000 - 100);
    ASSERT_EQ(held_by("bad"), 0u) << pause;
    after(200);
    ASSERT_EQ(held_by("bad"), 1u) << "one unit, after " << pause << " s";
    std::string probe;
    for (const auto& [ref, view] : store.open) {
      if (view.owner == "bad:1") probe = ref.job;
    }
    start(probe);
    fail(probe);
    finish(probe);  // elsewhere, or canceled
    submit("n" + std::to_string(pause) + probe);
  }
  after(301'000);
  ASSERT_EQ(held_by("bad"), 1u);
  for (const auto& [ref, view] : store.open) {
    if (view.owner != "bad:1") continue;
    const auto id = ref.job;
    start(id);
    finish(id);
    break;
  }
  EXPECT_EQ(state(), WorkerState::kReady);
  EXPECT_EQ(held_by("bad"), 2u) << "it works again";
}

TEST_F(BlameTest, an_overdue_worker_gets_nothing_and_its_unit_that_waits_moves) {
  beat();
  submit("hung");
  start("hung");
  submit("next");
  ASSERT_EQ(owner_of("next"), "a:1");
  after(59'000);
  EXPECT_EQ(owner_of("next"), "a:1");
  after(2'000);
  EXPECT_EQ(owner_of("next"), "");
  EXPECT_THAT(why("next"), HasSubstr("1 is overdue"));
  names = {"a", "b"};
  beat();
  EXPECT_EQ(owner_of("next"), "b:1");
  finish("next");
  finish("hung");
  beat();
  fill(4);
  EXPECT_EQ(held_by("a"), 2u) << "it goes on";
}

TEST_F(BlameTest, a_long_unit_is_overdue_after_ten_predicted_runs) {
  beat();
  submit("long", spec(R"("width":2048,"height":2048,"num_inference_steps":100)"));
  start("long");
  const auto predicted = scheduler->fleet().at(0).held.at(0).run_us;
  ASSERT_GT(predicted, 20'000 * kMs);
  submit("next");
  after(9 * predicted / kMs);
  EXPECT_EQ(owner_of("next"), "a:1");
  after(2 * predicted / kMs);
  EXPECT_EQ(owner_of("next"), "");
}

TEST_F(BlameTest, a_stuck_worker_gets_nothing_and_returns_what_it_has_not_started) {
  beat();
  submit("hung");
  start("hung");
  submit("next");
  scheduler->on_workers({worker("a", "stuck"), worker("b")}, now += 1'000 * kMs);
  settle();
  EXPECT_EQ(owner_of("next"), "b:1");
  EXPECT_EQ(owner_of("hung"), "a:1");
  fill(3);
  EXPECT_EQ(held_by("a"), 1u);
}

// A scheduler that was rebuilt from the stored state knows of each unit what one knows that saw all events.
TEST_F(BlameTest, a_rebuilt_scheduler_treats_suspects_and_failed_units_alike) {
  std::mt19937 random(5);
  names = {"a", "b", "c", "d"};
  beat();
  int submitted = 0;
  for (int i = 0; i < 500; ++i) {
    now += static_cast<std::int64_t>(random() % 40) * kMs;
    const auto action = random() % 6;
    std::vector<queue::UnitRef> held;
    for (const auto& [ref, view] : store.open) {
      if (!view.owner.empty()) held.push_back(ref);
    }
    if (held.size() < 4 || action == 0) {
      submit("j" + std::to_string(1000 + submitted++));
      continue;
    }
    const auto ref = held[random() % held.size()];
    if (action == 1) {
      store.lapse(ref, now);
    } else if (action == 2) {
      store.fail(ref, now);
    } else if (action == 3 && store.open.at(ref).state == job::State::kAssigned) {
      store.start(ref, now);
    } else {
      store.finish(ref, now, "canceled");
    }
    settle();
    if (i % 10 > 0) continue;
    beat();
    auto rebuilt = make();
    std::vector<queue::WorkerInfo> infos;
    for (const auto& name : names) infos.push_back(worker(name));
    rebuilt->rebuild(store.views(), scheduler->virtual_times(), infos, 0, now);
    EXPECT_TRUE(rebuilt->decide(now).empty()) << "after " << i;
    EXPECT_EQ(rebuilt->stats().ready, scheduler->stats().ready);
    for (const auto& [at, view] : store.open) {
      if (view.owner.empty()) {
        ASSERT_EQ(rebuilt->waits_for(at, now), why(at.job)) << "after " << i;
      }
    }
    if (random() % 2 == 0) std::swap(scheduler, rebuilt);
  }
}

// The audit corrects what a lost event would have said.
TEST_F(BlameTest, an_audit_finds_a_lapse_that_no_event_told) {
  names = {"a", "b"};
  beat();
  submit("p");
  start("p");
  store.lapse({"p", 0}, now);
  store.events.clear();
  now += 10 * kMs;
  scheduler->begin_audit();
  scheduler->audit(store.views(), now);
  settle();
  fill(6);
  const auto where = owner_of("p").substr(0, 1);
  ASSERT_NE(where, "");
  EXPECT_EQ(held_by(where), 1u);
}

}  // namespace
}  // namespace ditfleet::scheduling
