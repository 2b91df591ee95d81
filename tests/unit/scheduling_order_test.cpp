// Who goes before whom within a tenant, through the whole scheduler: jobs follow their adapters, pass what would load,
// yield when late.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "shared/core/nearest_name.h"
#include "tests/unit/scheduler_fixture.h"

namespace ditfleet::scheduling {
namespace {

using ::testing::HasSubstr;

// Through the whole scheduler: jobs that name adapters, on workers that hold some.
class AdapterScheduling : public SchedulerTest {
 protected:
  void SetUp() override {
    SchedulerOptions options;
    options.catalogue = catalogue();
    // Digests are the names here.
    options.adapters = [](const std::string&, const job::LoraUse& use, const job::ModelEntry&) -> Result<std::string> {
      if (use.name == "ink" || use.name == "oil") return use.name;
      return invalid_argument("there is no LoRA adapter '" + use.name + "'" + suggestion(use.name, {"ink", "oil"}));
    };
    options.new_nonce = [this] { return "n" + std::to_string(++nonces); };
    options.age_bound_ms = 60'000;
    scheduler = std::make_unique<Scheduler>(options, nullptr);
  }
  queue::WorkerInfo with_slots(const std::string& name, std::vector<std::string> adapters) {
    auto info = worker(name);
    info.adapter_slots = 2;
    info.host_adapter_bytes = 1'000'000'000;
    info.adapters = info.host_adapters = std::move(adapters);
    return info;
  }
  static std::string with(const std::string& adapter) { return spec(R"("loras":[{"name":")" + adapter + R"("}])"); }
};

TEST_F(AdapterScheduling, jobs_follow_their_adapters) {
  scheduler->on_workers({with_slots("i", {"ink"}), with_slots("o", {"oil"})}, now);
  submit("1", with("oil"));
  submit("2", with("ink"));
  EXPECT_EQ(owner_of("1"), "o:1");
  EXPECT_EQ(owner_of("2"), "i:1");
}

// One worker, busy; `first` would have to load there, `second`, behind it, would not.
class AdapterPassing : public AdapterScheduling {
 protected:
  // Runs of 1 s teach the scheduler what they take and what the tail is; then two are held, and two wait.
  void serve_one(const std::string& id, std::int64_t us) {
    store.start({id, 0}, now);
    settle();
    store.finish({id, 0}, now += us);
    settle();
  }
  void prepare(int priority_of_second) {
    const auto ink = [this] { return std::vector{with_slots("i", {"ink"})}; };
    scheduler->on_workers(ink(), now);
    for (int i = 0; i < 4; ++i) {
      submit("t" + std::to_string(i), with("ink"));
      serve_one("t" + std::to_string(i), 1'000 * kMs);
    }
    submit("h1", with("ink"));
    submit("h2", with("ink"));
    submit("first", with("oil"));
    now += 100 * kMs;
    submit("second", spec(R"("loras":[{"name":"ink"}],"priority":)" + std::to_string(priority_of_second)));
    scheduler->on_workers(ink(), now);
    serve_one("h1", 1'000 * kMs);  // its place is free now
  }
};

TEST_F(AdapterPassing, what_finds_its_adapter_there_passes_what_would_load) {
  prepare(0);
  EXPECT_EQ(owner_of("first"), "");
  EXPECT_EQ(owner_of("second"), "i:1");
  serve_one("h2", 1'000 * kMs);
  EXPECT_EQ(owner_of("first"), "i:1");
}

TEST_F(AdapterPassing, nobody_is_passed_by_less_urgent_units) {
  prepare(-1);
  EXPECT_EQ(owner_of("first"), "i:1");
  EXPECT_EQ(owner_of("second"), "");
}

TEST_F(AdapterScheduling, a_rebuilt_scheduler_knows_what_units_need) {
  submit("1", with("oil"));
  auto again = std::make_unique<Scheduler>(
      SchedulerOptions{.catalogue = catalogue(), .new_nonce = [] { return std::string("n"); }}, nullptr);
  again->rebuild(store.views(), {}, {with_slots("i", {"ink"}), with_slots("o", {"oil"})}, 0, now);
  const auto actions = again->decide(now);
  ASSERT_EQ(actions.assign.size(), 1u);
  EXPECT_EQ(actions.assign[0].owner, "o:1");
}

TEST_F(AdapterScheduling, an_unknown_adapter_is_rejected_with_the_nearest_name) {
  scheduler->on_workers({with_slots("i", {"ink"})}, now);
  submit("1", with("imk"));
  ASSERT_EQ(store.rejected.size(), 1u);
  EXPECT_THAT(store.rejected[0].error.message, HasSubstr("'ink'"));
}

TEST_F(AdapterScheduling, what_nobody_can_hold_waits_and_lets_others_pass) {
  scheduler->on_workers({worker("plain")}, now);
  submit("1", with("oil"));
  submit("2", spec(R"("width":256)"));
  EXPECT_EQ(owner_of("1"), "");
  EXPECT_EQ(owner_of("2"), "plain:1");
  now += 61'000 * kMs;  // aged: still nobody, and no endless round
  auto plain = worker("plain");
  scheduler->on_workers({plain}, now);
  settle();
  EXPECT_EQ(owner_of("1"), "");
  scheduler->on_workers({plain, with_slots("i", {})}, now);
  settle();
  EXPECT_EQ(owner_of("1"), "i:1");
}

// However far another tenant gets ahead: what waits for a worker that is not there holds nobody up.
TEST_F(AdapterScheduling, what_nobody_can_hold_does_not_stop_another_tenant) {
  scheduler->on_workers({worker("plain")}, now);
  submit("inky", with("oil"), "a");
  for (int i = 0; i < 20; ++i) submit("p" + std::to_string(i), spec(R"("width":256)"), "b");
  for (int i = 0; i < 20; ++i) {
    for (const auto& [ref, view] : std::map(store.open)) {
      if (view.state != job::State::kAssigned) continue;
      store.start(ref, now);
      store.finish(ref, now += 500 * kMs);
    }
    settle();
  }
  EXPECT_EQ(store.open.size(), 1u) << "only the one that nobody can take is left";
  EXPECT_EQ(owner_of("inky"), "");
}

// The same where workers could hold it, but have no place while one that cannot has.
TEST_F(AdapterScheduling, a_full_worker_that_alone_could_hold_it_stops_nobody) {
  const auto alone = with_slots("i", {"ink"});
  scheduler->on_workers({worker("plain"), alone}, now);
  for (int i = 0; i < 8; ++i) submit("long" + std::to_string(i), with("ink"), "a");
  for (int i = 0; i < 20; ++i) submit("p" + std::to_string(i), spec(R"("width":256)"), "b");
  std::size_t ended = 0;
  for (int i = 0; i < 20; ++i) {
    for (const auto& [ref, view] : std::map(store.open)) {
      if (view.state != job::State::kAssigned || view.owner != "plain:1") continue;
      store.start(ref, now);
      store.finish(ref, now += 500 * kMs);
      ++ended;
    }
    settle();
  }
  EXPECT_GE(ended, 15u);
}

// One that is late beyond what one in twenty is lets the next one go, once; and one in twenty may. Here `late` is, of
// three.
class SchedulerYieldTest : public SchedulerTest {
 protected:
  void late_next_last() {
    workers({"a"});
    for (int i = 0; i < 30; ++i) {
      submit("t" + std::to_string(i));
      serve("t" + std::to_string(i), 100 * kMs);
    }
    submit("held1");
    submit("held2");
    for (const char* id : {"late", "next", "last"}) {
      submit(id);
      now += 20 * kMs;
    }
    serve("held1", 1'000 * kMs);
  }
  void serve(const std::string& id, std::int64_t us) {
    store.start({id, 0}, now);
    settle();
    store.finish({id, 0}, now += us);
    settle();
  }
};

TEST_F(SchedulerYieldTest, who_is_late_in_any_case_yields_once) {
  late_next_last();
  EXPECT_EQ(owner_of("late"), "");
  EXPECT_EQ(owner_of("next"), "a:1");  // as late, but another has yielded of late
  serve("held2", 100 * kMs);
  EXPECT_EQ(owner_of("last"), "a:1");
  serve("next", 100 * kMs);
  EXPECT_EQ(owner_of("late"), "a:1");
}

TEST_F(SchedulerYieldTest, nobody_yields_where_it_is_turned_off) {
  SchedulerOptions options;
  options.catalogue = catalogue();
  options.late_units_yield = false;
  options.new_nonce = [this] { return "n" + std::to_string(++nonces); };
  scheduler = std::make_unique<Scheduler>(options, nullptr);
  late_next_last();
  EXPECT_EQ(owner_of("late"), "a:1");
}

}  // namespace
}  // namespace ditfleet::scheduling
