// The order of a tenant's units and the effect of adapters on it, through the whole scheduler.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "shared/core/nearest_name.h"
#include "tests/unit/coordinator/scheduling/scheduler_fixture.h"

namespace ditfleet::scheduling {
namespace {

using ::testing::HasSubstr;

class AdapterScheduling : public SchedulerTest {
 protected:
  void SetUp() override {
    SchedulerOptions options;
    options.catalogue = catalogue();
    // Names serve as digests.
    options.adapters = [](const std::string&, const job::LoraUse& use, const job::ModelEntry&) -> Result<std::string> {
      if (use.name == "ink" || use.name == "oil") return use.name;
      return invalid_argument("there is no LoRA adapter '" + use.name + "'" + suggestion(use.name, {"ink", "oil"}));
    };
    options.new_nonce = [this] { return "n" + std::to_string(++nonces); };
    options.age_bound_ms = 60'000;
    scheduler = std::make_unique<Scheduler>(options);
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

TEST_F(AdapterScheduling, a_short_run_overtakes_a_long_one_that_arrived_shortly_before) {
  workers({"w"});
  submit("held1");
  submit("held2");
  const auto steps = [](int n) { return spec("\"num_inference_steps\":" + std::to_string(n)); };
  submit("long", steps(50));
  now += 20 * kMs;
  submit("short", steps(1));
  submit("urgent", spec(R"("num_inference_steps":50,"priority":1)"));
  for (const char* next : {"urgent", "short", "long"}) {
    EXPECT_EQ(owner_of(next), "");
    store.finish(store.assignments[store.assignments.size() - 2].first, now, "canceled");
    settle();
    EXPECT_EQ(owner_of(next), "w:1") << next;
  }
}

TEST_F(AdapterScheduling, a_rebuilt_scheduler_knows_the_adapters_of_units) {
  submit("1", with("oil"));
  auto again = std::make_unique<Scheduler>(
      SchedulerOptions{.catalogue = catalogue(), .new_nonce = [] { return std::string("n"); }});
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

TEST_F(AdapterScheduling, a_unit_without_a_possible_worker_does_not_block_its_tenant) {
  scheduler->on_workers({worker("plain")}, now);
  submit("1", with("oil"));
  submit("2", spec(R"("width":256)"));
  EXPECT_EQ(owner_of("1"), "");
  EXPECT_EQ(owner_of("2"), "plain:1");
  now += 61'000 * kMs;  // older than the age bound
  auto plain = worker("plain");
  scheduler->on_workers({plain}, now);
  settle();
  EXPECT_EQ(owner_of("1"), "");
  scheduler->on_workers({plain, with_slots("i", {})}, now);
  settle();
  EXPECT_EQ(owner_of("1"), "i:1");
}

TEST_F(AdapterScheduling, a_unit_without_a_possible_worker_does_not_block_another_tenant) {
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
  EXPECT_EQ(store.open.size(), 1u) << "only the unit without a possible worker is left";
  EXPECT_EQ(owner_of("inky"), "");
}

TEST_F(AdapterScheduling, units_for_a_full_worker_do_not_block_units_for_another) {
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

}  // namespace
}  // namespace ditfleet::scheduling
