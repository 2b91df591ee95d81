// Adapters: which worker holds them, what a unit would wait for, what is evicted, and how the router uses that.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/scheduling/placement/earliest_finish_policy.h"
#include "tests/unit/coordinator/scheduling/adapter_routing_fixture.h"

namespace ditfleet::scheduling {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

class ResidencyTest : public ::testing::Test {
 protected:
  AdapterId adapter(const std::string& name) {
    const auto a = residency.intern(name);
    residency.set_size(a, kAdapterBytes);
    return a;
  }
  void worker(WorkerId w, const std::vector<AdapterId>& in_slots, const std::vector<AdapterId>& in_host,
              std::int64_t room = 3 * kAdapterBytes, int slots = 2) {
    queue::WorkerInfo info;
    info.adapter_slots = slots;
    info.host_adapter_bytes = room;
    info.adapter_load_bytes_per_s = 1'000'000'000;
    info.adapter_swap_us = 10'000;
    for (const auto a : in_slots) info.adapters.push_back(residency.name(a));
    for (const auto a : in_host) info.host_adapters.push_back(residency.name(a));
    residency.report(w, info, 0);
  }
  AdapterNeed need(WorkerId w, std::vector<AdapterId> adapters, std::int64_t now = 0) {
    return residency.scan(adapters, now).at(w);
  }
  Residency residency;
};

TEST_F(ResidencyTest, reports_what_a_unit_would_wait_for) {
  const auto a = adapter("a"), b = adapter("b"), c = adapter("c");
  worker(0, {a}, {a, b});
  EXPECT_EQ(need(0, {a}).swap_us, 0);
  EXPECT_EQ(need(0, {a}).load_us, 0);
  EXPECT_EQ(need(0, {b}).swap_us, 10'000);
  EXPECT_EQ(need(0, {b}).load_us, 0);
  EXPECT_EQ(need(0, {c}, kSecond).load_us, 100'000);
  EXPECT_EQ(need(0, {c}, kSecond).ready_us, kSecond + 100'000 + 10'000);  // load, then swap
  const auto all = need(0, {a, b, c}, kSecond);
  EXPECT_EQ(all.load_us, 100'000);
  EXPECT_EQ(all.swap_us, 20'000);
  EXPECT_EQ(need(0, {}).ready_us, 0);
}

TEST_F(ResidencyTest, loads_of_one_worker_queue_behind_each_other) {
  const auto a = adapter("a"), b = adapter("b");
  worker(0, {}, {});
  residency.hold(0, std::vector{a}, Eviction::kLeastWorth, kSecond);
  EXPECT_EQ(need(0, {a}, kSecond).load_us, 0);  // being loaded
  EXPECT_EQ(need(0, {a}, kSecond).ready_us, kSecond + 100'000);
  EXPECT_EQ(need(0, {b}, kSecond).ready_us, kSecond + 200'000 + 10'000);
}

TEST_F(ResidencyTest, too_few_slots_do_not_fit) {
  const auto a = adapter("a"), b = adapter("b"), c = adapter("c");
  worker(0, {}, {}, 3 * kAdapterBytes, 2);
  worker(1, {}, {}, 3 * kAdapterBytes, 0);
  EXPECT_TRUE(residency.scan(std::vector{a, b}, 0).fits(0));
  EXPECT_FALSE(residency.scan(std::vector{a, b, c}, 0).fits(0));
  EXPECT_FALSE(residency.scan(std::vector{a}, 0).fits(1));
  EXPECT_TRUE(residency.scan(std::vector<AdapterId>{}, 0).fits(1));
}

TEST_F(ResidencyTest, evicts_the_copy_of_least_worth_but_no_pinned_or_needed_one) {
  const auto a = adapter("a"), b = adapter("b"), c = adapter("c"), d = adapter("d");
  for (int i = 0; i < 10; ++i) residency.asked_for(a, 0);
  for (int i = 0; i < 6; ++i) residency.asked_for(b, 0);
  residency.asked_for(c, 0);
  worker(0, {}, {a, b, c});
  worker(1, {}, {a}, 10 * kAdapterBytes);
  EXPECT_THAT(residency.hold(0, std::vector{d}, Eviction::kLeastWorth, 1).from_host, ElementsAre(c));
  // The demand for `a` is highest, but two workers hold it, so `b` is worth more.
  residency.release(0, std::vector{d});
  for (int i = 0; i < 20; ++i) residency.asked_for(d, 1);
  EXPECT_THAT(residency.hold(0, std::vector{c}, Eviction::kLeastWorth, 2).from_host, ElementsAre(a));
  residency.pin(b, true);
  residency.pin(d, true);
  EXPECT_THAT(residency.hold(0, std::vector{a}, Eviction::kLeastWorth, 3).from_host,
              IsEmpty());  // c is needed, the rest pinned
}

TEST_F(ResidencyTest, a_report_replaces_the_prediction_except_for_loads_in_progress) {
  const auto a = adapter("a"), b = adapter("b");
  worker(0, {}, {a});
  residency.hold(0, std::vector{b}, Eviction::kLeastRecentlyUsed, 0);
  worker(0, {}, {});  // the worker evicted `a` and has not loaded `b` yet
  EXPECT_FALSE(residency.is_held(a));
  EXPECT_TRUE(residency.is_held(b));
  residency.release(0, std::vector{b});
  worker(0, {}, {});
  EXPECT_FALSE(residency.is_held(b));
  worker(0, {}, {a});
  residency.forget(0);
  EXPECT_FALSE(residency.is_held(a));
}

TEST_F(ResidencyTest, holders_have_all_adapters_of_the_unit) {
  const auto a = adapter("a"), b = adapter("b");
  worker(0, {a}, {a, b});
  worker(1, {}, {a});
  worker(2, {}, {b});
  const auto all = [&](std::vector<AdapterId> wanted) {
    std::vector<WorkerId> out;
    residency.scan(wanted, 0).for_holders([&](WorkerId w) { out.push_back(w); });
    return out;
  };
  EXPECT_THAT(all({a, b}), ElementsAre(0u));
  EXPECT_THAT(all({a}), UnorderedElementsAre(0u, 1u));
  EXPECT_THAT(all({}), IsEmpty());
  residency.hold(1, std::vector{b}, Eviction::kLeastWorth, 0);
  EXPECT_THAT(all({a, b}), UnorderedElementsAre(0u, 1u));  // also while it loads
}

TEST_F(ResidencyTest, demand_decays) {
  const auto a = adapter("a");
  for (int i = 0; i < 300; ++i) residency.asked_for(a, 0);
  EXPECT_NEAR(residency.demand(a, 0), 1.0, 0.01);
  EXPECT_LT(residency.demand(a, 3600 * kSecond), 0.001);
}

TEST_F(ResidencyTest, unused_adapters_are_forgotten) {
  const auto held = residency.intern("held"), named = residency.intern("named"), pinned = residency.intern("pinned"),
             sized = residency.intern("sized");
  worker(0, {}, {held});
  residency.refer(named);
  residency.pin(pinned, true);
  residency.set_size(sized, kAdapterBytes);
  for (int i = 0; i < 100; ++i) residency.intern("few" + std::to_string(i));
  residency.prune();
  EXPECT_EQ(residency.known(), 104u) << "pruning starts at 1,024";
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 1'000; ++i) residency.intern("digest" + std::to_string(round) + "." + std::to_string(i));
    residency.prune();
    EXPECT_LE(residency.known(), 2'104u);
  }
  EXPECT_EQ(residency.intern("held"), held);
  EXPECT_EQ(residency.intern("named"), named);
  EXPECT_EQ(residency.intern("pinned"), pinned);
  EXPECT_EQ(residency.intern("sized"), sized);
  EXPECT_TRUE(residency.is_held(held));
  residency.unrefer(named);
  residency.pin(pinned, false);
  residency.forget_sizes();  // it was deleted from the registry
  worker(0, {}, {});
  while (residency.known() < 1'024) residency.intern("more" + std::to_string(residency.known()));
  residency.prune();
  EXPECT_EQ(residency.known(), 0u);
}

TEST_F(AdapterRouting, goes_where_the_adapter_is_until_waiting_costs_more_than_loading) {
  for (const char* name : {"a", "x", "y", "z", "u"}) adapter(name);
  update({info("other", {}, {"x", "y", "z", "u"}), info("host", {}, {"a"}), info("slot", {"a"}, {"a"})});
  const std::vector<AdapterId> a = {adapter("a")};
  EarliestFinishPolicy policy({.load_weight = 1.0});
  EXPECT_EQ(chosen(policy, request(a)), "slot");
  hold("slot", 0, 100'000);  // longer than a swap
  EXPECT_EQ(chosen(policy, request(a)), "host");
  hold("host", 1, 400'000);  // `slot` is free sooner than a load and its weight
  EXPECT_EQ(chosen(policy, request(a)), "slot");
  fleet.release(fleet.intern_owner("slot:1"), {"j", 0}, 0);
  hold("slot", 2, 500'000);
  EXPECT_EQ(chosen(policy, request(a)), "other");
  EXPECT_THAT(policy.choose(fleet, costs, request(a), 0).reason, HasSubstr("adapter load 100 ms; adapter swap 50 ms"));
  EarliestFinishPolicy heavy({.load_weight = 8.0});
  EXPECT_EQ(chosen(heavy, request(a)), "host");
}

TEST_F(AdapterRouting, a_unit_is_due_after_its_own_run) {
  EXPECT_EQ(EarliestFinishPolicy({}).due_after_us(3 * kSecond), 3 * kSecond);
  EXPECT_EQ(EarliestFinishPolicy({.due_runs = 0.5}).due_after_us(3 * kSecond), kSecond * 3 / 2);
}

TEST_F(AdapterRouting, a_full_holder_is_waited_for_only_while_the_whole_lane_gains) {
  adapter("a");
  update({info("empty", {}), info("holder", {"a"}, {"a"})});
  hold("holder", 0, 50'000);
  hold("holder", 1, 50'000);
  const std::vector<AdapterId> a = {adapter("a")};
  EarliestFinishPolicy policy({.load_weight = 1.0});
  EXPECT_EQ(policy.choose(fleet, costs, request(a), 0).kind,
            Route::Kind::kWait);  // starts in 0.1 s; on `empty`: load, its weight and swap, 0.25 s
  auto must_go = request(a);
  must_go.may_wait = false;
  EXPECT_EQ(chosen(policy, must_go), "empty");
  EXPECT_EQ(chosen(policy, request(a, 10 * kSecond)), "empty");  // the holder could not finish the lane in time
}

}  // namespace
}  // namespace ditfleet::scheduling
