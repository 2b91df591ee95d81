// Units that need more adapter slots than any worker has, or any open worker has: they block no other unit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/scheduling/order/fair_queue.h"
#include "tests/unit/coordinator/scheduling/scheduler_fixture.h"

namespace ditfleet::scheduling {
namespace {

using ::testing::HasSubstr;

constexpr int kMany = 200;  // lanes: more than one round looks at

class SlotsTest : public NamedAdaptersTest {
 protected:
  static std::string with(const std::vector<int>& adapters) {
    std::string loras;
    for (const int a : adapters) loras += (loras.empty() ? "" : ",") + (R"({"name":"a)" + std::to_string(a) + "\"}");
    return spec("\"loras\":[" + loras + "]");
  }
  // Each has a different set of five adapters, so a lane of its own.
  void submit_wide(const std::string& tenant) {
    for (int i = 0; i < kMany; ++i)
      submit(tenant + std::to_string(i), with({i % 5, 5 + i / 5 % 5, 10 + i / 25, 20, 21}), tenant);
  }
  // Runs assigned units until none is left. Returns how many have ended.
  int serve() {
    int ended = 0;
    for (bool any = true; any;) {
      any = false;
      for (const auto& [ref, view] : std::map(store.open)) {
        if (view.state != job::State::kAssigned) continue;
        store.start(ref, now);
        store.finish(ref, now += 500 * kMs);
        any = true;
        ++ended;
      }
      settle();
    }
    return ended;
  }
};

TEST_F(SlotsTest, unplaceable_lanes_do_not_block_their_tenant) {
  submit_wide("a");
  for (int i = 0; i < 10; ++i) submit("plain" + std::to_string(i), spec(R"("width":256)"), "a");
  scheduler->on_workers({with_slots("w", 4)}, now);
  settle();
  EXPECT_EQ(serve(), 10);
  EXPECT_EQ(scheduler->stats().ready, static_cast<std::size_t>(kMany));
}

TEST_F(SlotsTest, unplaceable_lanes_do_not_block_another_tenant) {
  submit_wide("a");
  submit_wide("b");
  for (int i = 0; i < 10; ++i) submit("plain" + std::to_string(i), spec(R"("width":256)"), "c");
  scheduler->on_workers({with_slots("w", 4)}, now);
  settle();
  EXPECT_EQ(serve(), 10);
  scheduler->on_workers({with_slots("w", 4), with_slots("large", 5)}, now);
  settle();
  EXPECT_EQ(serve(), 2 * kMany) << "once a worker can take them";
}

TEST_F(SlotsTest, a_full_large_worker_does_not_idle_a_small_one) {
  scheduler->on_workers({with_slots("large", 5), with_slots("small", 1)}, now);
  submit_wide("a");
  for (int i = 0; i < 10; ++i) submit("narrow" + std::to_string(i), with({30 + i}), "a");
  int on_small = 0;
  for (const auto& [ref, owner] : store.assignments) on_small += owner == "small:1";
  EXPECT_EQ(on_small, 2) << "its capacity";
  EXPECT_EQ(scheduler->stats().held, 4u);
}

TEST_F(SlotsTest, units_become_unplaceable_when_a_worker_reports_fewer_slots) {
  scheduler->on_workers({with_slots("w", 5)}, now);
  submit_wide("a");
  scheduler->on_workers({with_slots("w", 1)}, now);
  for (int i = 0; i < 3; ++i) submit("plain" + std::to_string(i), spec(R"("width":256)"), "b");
  EXPECT_EQ(serve(), 2 + 3) << "the units it held already, and those it can take";
}

TEST_F(SlotsTest, unplaceable_units_earn_no_credit) {
  submit_wide("a");
  scheduler->on_workers({with_slots("w", 4)}, now);
  for (int i = 0; i < 40; ++i) submit("b" + std::to_string(i), spec(R"("width":256)"), "b");
  for (std::size_t i = 0; i < 20; ++i) {  // half of them are served while `a` has no other unit
    ASSERT_GT(store.assignments.size(), i);
    store.start(store.assignments[i].first, now);
    store.finish(store.assignments[i].first, now += 500 * kMs);
    settle();
  }
  const auto from = store.assignments.size();
  for (int i = 0; i < 40; ++i) submit("plain" + std::to_string(i), spec(R"("width":256)"), "a");
  serve();
  ASSERT_GE(store.assignments.size(), from + 16);
  int of_a = 0;
  for (std::size_t i = from; i < from + 16; ++i) of_a += store.assignments[i].first.job.starts_with("plain");
  EXPECT_NEAR(of_a, 8, 2) << "its share from now on";
}

TEST_F(SlotsTest, a_unit_moves_to_an_idle_worker_though_others_wait_for_more_slots) {
  submit_wide("a");
  scheduler->on_workers({with_slots("w", 4)}, now);
  settle();
  submit("1", spec(R"("width":1024,"height":1024,"num_inference_steps":40)"));
  submit("2", spec(R"("width":1024,"height":1024,"num_inference_steps":40)"));
  store.start({"1", 0}, now);
  settle();
  now += 1'000 * kMs;
  scheduler->on_workers({with_slots("w", 4), with_slots("idle", 4)}, now);
  settle();
  EXPECT_EQ(owner_of("2"), "idle:1");
}

TEST_F(SlotsTest, a_job_with_more_adapters_than_any_worker_has_slots_is_rejected) {
  submit("early", with({1, 2, 3, 4, 5}));  // no worker yet
  scheduler->on_workers({with_slots("w", 4)}, now);
  settle();
  EXPECT_EQ(scheduler->stats().unplaceable, 1u);
  submit("wide", with({1, 2, 3, 4, 5}));
  submit("fits", with({1, 2, 3, 4}));
  ASSERT_EQ(store.rejected.size(), 1u);
  EXPECT_EQ(store.rejected[0].id, "wide");
  EXPECT_EQ(store.rejected[0].error.code, Code::kInvalidArgument);
  EXPECT_EQ(store.rejected[0].error.param, "loras");
  EXPECT_THAT(store.rejected[0].error.message,
              HasSubstr("lists 5 adapters, but workers of 'tiny' have at most 4 slots"));
  EXPECT_EQ(owner_of("fits"), "w:1");
  EXPECT_EQ(owner_of("early"), "");
  auto starting = with_slots("large", 0);
  starting.state = "starting";
  scheduler->on_workers({with_slots("w", 4), starting}, now);
  submit("hopeful", with({1, 2, 3, 4, 6}));
  EXPECT_EQ(store.rejected.size(), 1u) << "its slots are not reported yet";
  scheduler->on_workers({with_slots("w", 4), with_slots("large", 6)}, now);
  settle();
  EXPECT_EQ(owner_of("early"), "large:1");
  EXPECT_EQ(owner_of("hopeful"), "large:1");
  scheduler->on_workers({with_slots("w", 4)}, now);  // it restarts
  submit("patient", with({1, 2, 3, 4, 7}));
  EXPECT_EQ(store.rejected.size(), 1u);
  EXPECT_EQ(owner_of("patient"), "");
}

TEST_F(SlotsTest, a_starting_worker_that_reports_its_slots_counts) {
  auto starting = with_slots("w", 4);
  starting.state = "starting";
  scheduler->on_workers({starting}, now);
  submit("wide", with({1, 2, 3, 4, 5}));
  submit("fits", with({1, 2, 3, 4}));
  ASSERT_EQ(store.rejected.size(), 1u);
  EXPECT_EQ(store.rejected[0].id, "wide");
  EXPECT_EQ(owner_of("fits"), "");
  scheduler->on_workers({with_slots("w", 4)}, now);
  settle();
  EXPECT_EQ(owner_of("fits"), "w:1");
}

TEST_F(SlotsTest, workers_without_slots_reject_nothing) {
  scheduler->on_workers({with_slots("plain", 0)}, now);
  submit("1", with({1}));
  EXPECT_TRUE(store.rejected.empty());
  EXPECT_EQ(owner_of("1"), "");
}

TEST(FairQueueSlots, a_unit_past_the_age_bound_goes_though_an_older_one_needs_more_slots) {
  FairQueue queue({}, 1'000);
  const auto t = queue.tenants().intern("a");
  queue.tenants().open(t);
  queue.push({.tenant = t, .lane = 0, .ready_us = 0, .arrival = 1, .adapter_slots = 5, .prior_us = 10});
  queue.push({.tenant = t, .lane = 1, .priority = 9, .ready_us = 1'500, .arrival = 2, .prior_us = 10});
  const auto aged =
      queue.push({.tenant = t, .lane = 2, .ready_us = 100, .arrival = 3, .adapter_slots = 4, .prior_us = 10});
  const FairQueue::Round round{.skipped = [](LaneId) { return false; }};
  const auto next = queue.next(0, 4, 2'000, round);
  ASSERT_TRUE(next);
  EXPECT_EQ(next->handle, aged);
  EXPECT_TRUE(next->aged);
  EXPECT_FALSE(queue.next(0, -1, 2'000, round));
  EXPECT_FALSE(queue.has_work(0, -1));
  EXPECT_TRUE(queue.has_work(0, 0));
}

}  // namespace
}  // namespace ditfleet::scheduling
