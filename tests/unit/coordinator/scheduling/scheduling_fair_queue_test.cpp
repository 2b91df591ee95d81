#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "coordinator/scheduling/order/fair_queue.h"

namespace ditfleet::scheduling {
namespace {

constexpr std::int64_t kAgeBound = 60'000'000;
constexpr int kSlots = 4;  // the most open adapter slots
const FairQueue::Round kNoneSkipped{.skipped = [](LaneId) { return false; }};

class FairQueueTest : public ::testing::Test {
 protected:
  FairQueue::Handle push(const std::string& tenant, std::int64_t cost, int priority = 0, std::int64_t deadline = 0,
                         std::int64_t ready = 0, ClassId lane = 0) {
    const auto t = queue.tenants().intern(tenant);
    queue.tenants().open(t);
    const auto handle = queue.push({.tenant = t,
                                    .lane = lane,
                                    .priority = priority,
                                    .deadline_us = deadline,
                                    .ready_us = ready,
                                    .arrival = ++arrivals,
                                    .prior_us = cost});
    costs[handle] = cost;
    return handle;
  }
  // Serves the next unit until it ends. Returns its handle.
  std::optional<FairQueue::Handle> serve(std::int64_t now = 0) {
    const auto next = queue.next(0, kSlots, now, kNoneSkipped);
    if (!next) return std::nullopt;
    const auto tenant = queue.at(next->handle).tenant;
    const auto cost = costs.at(next->handle);
    queue.remove(next->handle);
    queue.tenants().charge(tenant, cost);
    queue.tenants().settle(tenant, cost, cost);
    queue.tenants().close(tenant);
    served[queue.tenants().name(tenant)] += cost;
    return next->handle;
  }

  FairQueue queue{{{"gold", 3.0}, {"silver", 1.0}}, kAgeBound};
  std::map<FairQueue::Handle, std::int64_t> costs;
  std::map<std::string, std::int64_t> served;
  std::uint64_t arrivals = 0;
};

TEST_F(FairQueueTest, the_gap_between_backlogged_tenants_is_at_most_the_largest_unit) {
  std::mt19937 random(7);
  constexpr std::int64_t kLargest = 5'000;
  for (int i = 0; i < 2'000; ++i) push("a", 1 + static_cast<std::int64_t>(random() % kLargest));
  for (int i = 0; i < 2'000; ++i) push("b", 1 + static_cast<std::int64_t>(random() % 50));  // many small ones
  std::int64_t widest = 0;
  while (queue.tenant_work_us(0, 0) > 0 && queue.tenant_work_us(0, 1) > 0) {
    serve();
    widest = std::max(widest, std::abs(served["a"] - served["b"]));
  }
  EXPECT_GT(widest, 0);
  EXPECT_LE(widest, kLargest);
}

TEST_F(FairQueueTest, weights_divide_the_service) {
  for (int i = 0; i < 1'000; ++i) push("silver", 100);
  for (int i = 0; i < 1'000; ++i) push("gold", 100);
  for (int i = 0; i < 800; ++i) serve();
  EXPECT_NEAR(static_cast<double>(served["gold"]), 3.0 * static_cast<double>(served["silver"]), 400.0);
}

TEST_F(FairQueueTest, idle_tenants_accumulate_no_credit) {
  for (int i = 0; i < 100; ++i) push("busy", 100);
  for (int i = 0; i < 50; ++i) serve();
  for (int i = 0; i < 100; ++i) push("late", 100);
  const auto before = served["busy"];
  for (int i = 0; i < 20; ++i) serve();
  EXPECT_NEAR(static_cast<double>(served["busy"] - before), 1'000.0, 100.0);
  EXPECT_NEAR(static_cast<double>(served["late"]), 1'000.0, 100.0);
}

TEST_F(FairQueueTest, a_tenant_that_returns_after_all_were_idle_starts_level) {
  push("a", 1'000);
  serve();
  push("b", 10);
  serve();  // all are idle; `a` has had 1000, and `b` started there
  for (int i = 0; i < 10; ++i) {
    push("a", 100);
    push("b", 100);
  }
  served.clear();
  for (int i = 0; i < 10; ++i) serve();
  EXPECT_EQ(served["a"], 500);
  EXPECT_EQ(served["b"], 500);
}

TEST_F(FairQueueTest, within_a_tenant_priority_then_deadline_then_arrival_decide) {
  const auto plain = push("a", 1);
  const auto later = push("a", 1, 0, 2'000);
  const auto sooner = push("a", 1, 0, 1'000, 0, 1);  // in another lane
  const auto urgent = push("a", 1, 5, 0, 0, 2);
  const auto plain2 = push("a", 1);
  EXPECT_EQ(serve(), urgent);
  EXPECT_EQ(serve(), sooner);
  EXPECT_EQ(serve(), later);
  EXPECT_EQ(serve(), plain);
  EXPECT_EQ(serve(), plain2);
  EXPECT_EQ(serve(), std::nullopt);
}

TEST_F(FairQueueTest, the_age_bound_limits_waits_behind_higher_priority) {
  const auto humble = push("a", 100, -100, 0, 0);
  std::int64_t now = 0;
  std::int64_t waited = -1;
  for (int i = 0; i < 10'000 && waited < 0; ++i) {
    now += 100'000;
    push("a", 100, 100, 0, now);  // a stream of urgent units that never ends
    if (serve(now) == humble) waited = now;
  }
  EXPECT_GT(waited, kAgeBound - 200'000);
  EXPECT_LE(waited, kAgeBound + 200'000);
}

TEST_F(FairQueueTest, old_units_give_a_tenant_no_more_than_its_share) {
  for (int i = 0; i < 1'000; ++i) push("flood", 100, 0, 0, 0);
  const std::int64_t now = 10 * kAgeBound;  // the flood is older than the age bound
  for (int i = 0; i < 100; ++i) push("small", 100, 0, 0, now);
  for (int i = 0; i < 100; ++i) serve(now);
  EXPECT_NEAR(static_cast<double>(served["small"]), 5'000.0, 100.0);
}

TEST_F(FairQueueTest, skipped_lanes_are_passed_over_except_for_units_past_the_age_bound) {
  const auto first = push("a", 1, 0, 0, 0, 3);
  const auto second = push("a", 1, 0, 0, 0, 4);
  const FairQueue::Round skip3{.skipped = [](LaneId lane) { return lane == 3; }};
  EXPECT_EQ(queue.next(0, kSlots, 0, skip3)->handle, second);
  EXPECT_FALSE(queue.next(0, kSlots, 0, skip3)->aged);
  EXPECT_EQ(queue.next(0, kSlots, kAgeBound + 1, skip3)->handle, first);
  EXPECT_TRUE(queue.next(0, kSlots, kAgeBound + 1, skip3)->aged);
}

TEST_F(FairQueueTest, no_tenant_gets_far_ahead_of_one_whose_lanes_are_skipped) {
  push("a", 1, 0, 0, 0, 3);
  const auto better = push("a", 1, 0, 0, 0, 4);
  const auto other = push("b", 1, 0, 0, 0, 5);
  FairQueue::Round round{.skipped = [](LaneId lane) { return lane != 5; },
                         .missing = [](LaneId lane) { return lane == 3 ? 10 : 5; },
                         .max_lead_us = 100};
  EXPECT_EQ(queue.next(0, kSlots, 0, round)->handle, other);
  queue.tenants().charge(queue.at(other).tenant, 101);
  const auto turn = queue.next(0, kSlots, 0, round);
  ASSERT_TRUE(turn);
  EXPECT_EQ(turn->handle, better);  // the least is missing
  EXPECT_TRUE(turn->behind);
  round.closed = [](LaneId lane) { return lane != 5; };  // no worker can take them
  EXPECT_EQ(queue.next(0, kSlots, 0, round)->handle, other);
}

TEST_F(FairQueueTest, a_skipped_unit_goes_when_no_other_tenant_may_get_ahead) {
  const auto waits = push("a", 1, 0, 0, 0, 3);
  const auto b = queue.tenants().intern("b");
  queue.push({.tenant = b, .lane = 4, .arrival = ++arrivals, .prior_us = 5, .cost_us = 5});
  queue.tenants().charge(queue.at(waits).tenant, 10);
  queue.tenants().charge(b, 70);
  const auto skip_first = [](LaneId lane) { return lane == 3; };
  EXPECT_EQ(queue.at(queue.next(0, kSlots, 0, {.skipped = skip_first, .max_lead_us = 65})->handle).tenant, b);
  const auto turn = queue.next(
      0, kSlots, 0, {.skipped = skip_first, .max_lead_us = 60});  // `b` has had 60 more; with one more unit, too much
  ASSERT_TRUE(turn);
  EXPECT_EQ(turn->handle, waits);
  EXPECT_TRUE(turn->behind);
  const FairQueue::Round alone{.skipped = [](LaneId) { return true; }, .max_lead_us = 60};
  EXPECT_FALSE(queue.next(0, kSlots, 0, alone));  // no other tenant is held back: it may wait
}

// Lanes are skipped at random, and charges are not settled.
TEST_F(FairQueueTest, with_skipped_lanes_the_gap_is_at_most_two_of_the_largest_units) {
  constexpr std::int64_t kLargest = 5'000;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    FairQueue queue({}, kAgeBound);
    std::mt19937 random(seed);
    std::vector<std::int64_t> had(4, 0);
    std::uint64_t arrivals_here = 0;
    const auto add = [&](TenantId t) {
      const auto cost = 1 + static_cast<std::int64_t>(random() % kLargest);
      queue.tenants().open(t);
      queue.push({.tenant = t,
                  .lane = static_cast<LaneId>(t * 8 + random() % 8),
                  .arrival = ++arrivals_here,
                  .prior_us = cost,
                  .cost_us = cost});
    };
    for (int t = 0; t < 4; ++t) {
      const auto id = queue.tenants().intern("t" + std::to_string(t));
      for (int i = 0; i < 50; ++i) add(id);
    }
    std::int64_t widest = 0;
    for (int served_units = 0; served_units < 3'000; ++served_units) {
      std::set<LaneId> skipped;
      for (LaneId lane = 0; lane < 32; ++lane) {
        if (random() % 4 != 0) skipped.insert(lane);
      }
      const FairQueue::Round round{.skipped = [&](LaneId lane) { return skipped.contains(lane); },
                                   .max_lead_us = kLargest};
      const auto next = queue.next(0, kSlots, 0, round);
      if (!next) continue;  // all wait
      const auto unit = queue.at(next->handle);
      queue.remove(next->handle);
      queue.tenants().charge(unit.tenant, unit.cost_us);
      had[unit.tenant] += unit.cost_us;
      add(unit.tenant);  // always backlogged
      const auto [least, most] = std::minmax_element(had.begin(), had.end());
      widest = std::max(widest, *most - *least);
    }
    EXPECT_LE(widest, 2 * kLargest) << seed;
    EXPECT_GT(widest, 0);
  }
}

TEST_F(FairQueueTest, totals_follow_every_push_and_remove) {
  std::mt19937 random(3);
  std::set<FairQueue::Handle> live;
  for (int i = 0; i < 5'000; ++i) {
    if (live.empty() || random() % 3 != 0) {
      live.insert(push("t" + std::to_string(random() % 7), 1 + random() % 100, static_cast<int>(random() % 3),
                       random() % 1'000, 0, random() % 5));
    } else {
      const auto handle = *std::next(live.begin(), static_cast<long>(random() % live.size()));
      const auto tenant = queue.at(handle).tenant;
      queue.remove(handle);
      queue.tenants().charge(tenant, 10);
      queue.tenants().close(tenant);
      live.erase(handle);
    }
  }
  std::map<LaneId, std::int64_t> by_lane;
  std::map<TenantId, std::int64_t> by_tenant;
  for (const auto handle : live) {
    by_lane[queue.at(handle).lane] += queue.at(handle).prior_us;
    by_tenant[queue.at(handle).tenant] += queue.at(handle).prior_us;
  }
  EXPECT_EQ(queue.size(), live.size());
  EXPECT_EQ(by_lane.size(), 5u);
  for (const auto& [lane, work] : by_lane) EXPECT_EQ(queue.lane_work_us(lane), work) << lane;
  for (const auto& [tenant, work] : by_tenant) EXPECT_EQ(queue.tenant_work_us(0, tenant), work) << tenant;
  std::size_t drained = 0;
  while (serve()) ++drained;
  EXPECT_EQ(drained, live.size());
  for (const auto& [lane, work] : by_lane) EXPECT_EQ(queue.lane_work_us(lane), 0) << lane;
  for (const auto& [tenant, work] : by_tenant) EXPECT_EQ(queue.tenant_work_us(0, tenant), 0) << tenant;
}

TEST(Tenants, no_tenant_starts_behind_a_prediction) {
  Tenants tenants({});
  const auto early = tenants.intern("early"), late = tenants.intern("late");
  tenants.open(early);
  tenants.charge(early, 1'000'000);  // wildly wrong
  tenants.open(late);
  EXPECT_EQ(tenants.virtual_time(late), 0);
  tenants.settle(early, 1'000'000, 10);
  EXPECT_EQ(tenants.virtual_time(early), 10);
}

TEST(Tenants, no_tenant_starts_behind_a_charge_that_is_a_guess) {
  Tenants tenants({});
  const auto a = tenants.intern("a"), b = tenants.intern("b");
  for (const auto t : {a, b}) tenants.open(t);
  tenants.wait(a);
  tenants.charge(a, 100);
  tenants.charge(a, 1'000'000, true);
  tenants.wait(b);
  EXPECT_EQ(tenants.virtual_time(b), 100);
  tenants.leave(b);
  tenants.settle(a, 1'000'000, 50, true);
  tenants.wait(b);
  EXPECT_EQ(tenants.virtual_time(b), 150);
}

TEST(Tenants, a_tenant_that_begins_to_wait_starts_among_the_waiting_ones) {
  Tenants tenants({});
  const auto least = tenants.intern("least"), most = tenants.intern("most"), late = tenants.intern("late");
  for (const auto t : {least, most, late}) tenants.open(t);
  tenants.wait(least);
  tenants.wait(most);
  const auto served = [&](TenantId t, std::int64_t us) {
    tenants.charge(t, us);
    tenants.settle(t, us, us);
  };
  served(least, 100);
  served(most, 300);
  tenants.wait(late);
  EXPECT_EQ(tenants.virtual_time(late), 100);  // no credit for idle time
  tenants.leave(late);
  served(late, 50);
  tenants.wait(late);
  EXPECT_EQ(tenants.virtual_time(late), 150);
  tenants.leave(late);
  served(late, 900);  // while no other tenant waited
  tenants.wait(late);
  EXPECT_EQ(tenants.virtual_time(late), 300);
}

TEST(Tenants, a_tenant_that_used_little_starts_level_when_it_begins_to_wait) {
  Tenants tenants({});
  const auto heavy = tenants.intern("heavy"), light = tenants.intern("light");
  for (const auto t : {heavy, light}) tenants.open(t);
  tenants.wait(heavy);
  for (int i = 0; i < 10; ++i) {
    tenants.charge(heavy, 100);
    tenants.settle(heavy, 100, 100);
  }
  tenants.charge(light, 100);  // it never waited
  tenants.wait(light);
  EXPECT_EQ(tenants.virtual_time(light), 1'000);  // including what it has in flight
  tenants.leave(heavy);
  tenants.leave(light);
  tenants.settle(light, 100, 100);
  const auto third = tenants.intern("third");
  tenants.open(third);
  tenants.wait(third);  // alone: level with the tenant that had most
  EXPECT_EQ(tenants.virtual_time(third), 1'000);
}

TEST(Tenants, prune_forgets_only_idle_tenants_that_would_start_afresh) {
  Tenants tenants({});
  for (int i = 0; i < 100; ++i) {
    const auto t = tenants.intern("t" + std::to_string(i));
    tenants.open(t);
    if (i > 0) tenants.close(t);  // t0 stays active at 0
  }
  const auto debtor = tenants.intern("t99");
  tenants.charge(debtor, 700);
  tenants.settle(debtor, 700, 500);
  tenants.prune(10);
  for (int i = 1; i < 99; ++i) ASSERT_FALSE(tenants.find("t" + std::to_string(i))) << i;
  ASSERT_EQ(tenants.find("t99"), debtor);
  EXPECT_EQ(tenants.virtual_time(debtor), 500);
  EXPECT_TRUE(tenants.find("t0"));
}

}  // namespace
}  // namespace ditfleet::scheduling
