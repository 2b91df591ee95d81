// Adapters in routing: who holds what, what it would cost, what goes for want of room; and the policies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "coordinator/scheduling/placement/fleet.h"
#include "coordinator/scheduling/placement/residency.h"
#include "coordinator/scheduling/placement/router.h"
#include "tests/unit/scheduler_fixture.h"

namespace ditfleet::scheduling {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr std::int64_t kSecond = 1'000'000;
constexpr std::int64_t kSize = 100'000'000;  // 0.1 s at 1 GB/s

class ResidencyTest : public ::testing::Test {
 protected:
  AdapterId adapter(const std::string& name) {
    const auto a = residency.intern(name);
    residency.set_size(a, kSize);
    return a;
  }
  void worker(WorkerId w, std::vector<AdapterId> in_slots, std::vector<AdapterId> in_host,
              std::int64_t room = 3 * kSize, int slots = 2) {
    residency.report(w,
                     {.slots = slots,
                      .host_bytes = room,
                      .load_bytes_per_s = 1e9,
                      .swap_us = 10'000,
                      .in_slots = std::move(in_slots),
                      .in_host = std::move(in_host)},
                     0);
  }
  AdapterNeed need(WorkerId w, std::vector<AdapterId> adapters, std::int64_t now = 0) {
    return residency.scan(adapters, now).at(w);
  }
  Residency residency;
};

TEST_F(ResidencyTest, says_what_a_unit_would_wait_for) {
  const auto a = adapter("a"), b = adapter("b"), c = adapter("c");
  worker(0, {a}, {a, b});
  EXPECT_EQ(need(0, {a}).swap_us, 0);
  EXPECT_EQ(need(0, {a}).load_us, 0);
  EXPECT_EQ(need(0, {b}).swap_us, 10'000);
  EXPECT_EQ(need(0, {b}).load_us, 0);
  EXPECT_EQ(need(0, {c}, kSecond).load_us, 100'000);
  EXPECT_EQ(need(0, {c}, kSecond).ready_us, kSecond + 100'000 + 10'000);  // and then in its slot
  const auto all = need(0, {a, b, c}, kSecond);
  EXPECT_EQ(all.load_us, 100'000);
  EXPECT_EQ(all.swap_us, 20'000);
  EXPECT_EQ(need(0, {}).ready_us, 0);
}

TEST_F(ResidencyTest, loads_of_one_worker_queue_behind_each_other) {
  const auto a = adapter("a"), b = adapter("b");
  worker(0, {}, {});
  residency.hold(0, std::vector{a}, Eviction::kLeastWorth, kSecond);
  EXPECT_EQ(need(0, {a}, kSecond).load_us, 0);  // on its way
  EXPECT_EQ(need(0, {a}, kSecond).ready_us, kSecond + 100'000);
  EXPECT_EQ(need(0, {b}, kSecond).ready_us, kSecond + 200'000 + 10'000);
}

TEST_F(ResidencyTest, too_few_slots_do_not_fit) {
  const auto a = adapter("a"), b = adapter("b"), c = adapter("c");
  worker(0, {}, {}, 3 * kSize, 2);
  worker(1, {}, {}, 3 * kSize, 0);
  EXPECT_TRUE(residency.scan(std::vector{a, b}, 0).fits(0));
  EXPECT_FALSE(residency.scan(std::vector{a, b, c}, 0).fits(0));
  EXPECT_FALSE(residency.scan(std::vector{a}, 0).fits(1));
  EXPECT_TRUE(residency.scan(std::vector<AdapterId>{}, 0).fits(1));
}

TEST_F(ResidencyTest, what_is_worth_least_goes_and_pins_and_what_is_needed_stay) {
  const auto a = adapter("a"), b = adapter("b"), c = adapter("c"), d = adapter("d");
  for (int i = 0; i < 10; ++i) residency.asked_for(a, 0);
  for (int i = 0; i < 6; ++i) residency.asked_for(b, 0);
  residency.asked_for(c, 0);
  worker(0, {}, {a, b, c});
  worker(1, {}, {a}, 10 * kSize);
  EXPECT_THAT(residency.hold(0, std::vector{d}, Eviction::kLeastWorth, 1).from_host, ElementsAre(c));
  // a is asked for most, but held by two: b is worth more.
  residency.release(0, std::vector{d}, 1);
  for (int i = 0; i < 20; ++i) residency.asked_for(d, 1);
  EXPECT_THAT(residency.hold(0, std::vector{c}, Eviction::kLeastWorth, 2).from_host, ElementsAre(a));
  residency.pin(b, true);
  residency.pin(d, true);
  EXPECT_THAT(residency.hold(0, std::vector{a}, Eviction::kLeastWorth, 3).from_host,
              IsEmpty());  // c is needed, the rest pinned
}

TEST_F(ResidencyTest, a_report_replaces_what_was_predicted_but_not_what_is_on_its_way) {
  const auto a = adapter("a"), b = adapter("b");
  worker(0, {}, {a});
  residency.hold(0, std::vector{b}, Eviction::kLeastRecentlyUsed, 0);
  worker(0, {}, {});  // an older heartbeat: a is gone, b is not there yet
  EXPECT_THAT(residency.holders(a), IsEmpty());
  EXPECT_THAT(residency.holders(b), ElementsAre(0u));
  residency.release(0, std::vector{b}, 0);
  worker(0, {}, {});
  EXPECT_THAT(residency.holders(b), IsEmpty());
  worker(0, {}, {a});
  residency.forget(0);
  EXPECT_THAT(residency.holders(a), IsEmpty());
}

TEST_F(ResidencyTest, holders_have_all_that_is_asked_for) {
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
  EXPECT_TRUE(residency.has(0, std::vector{a, b}));
  EXPECT_FALSE(residency.has(1, std::vector{a, b}));
  EXPECT_TRUE(residency.has(1, std::vector<AdapterId>{}));
  residency.hold(1, std::vector{b}, Eviction::kLeastWorth, 0);
  EXPECT_TRUE(residency.has(1, std::vector{a, b}));  // on its way
}

TEST_F(ResidencyTest, demand_fades) {
  const auto a = adapter("a");
  for (int i = 0; i < 300; ++i) residency.asked_for(a, 0);
  EXPECT_NEAR(residency.demand(a, 0), 1.0, 0.01);
  EXPECT_LT(residency.demand(a, 3600 * kSecond), 0.001);
}

TEST_F(ResidencyTest, what_nobody_holds_names_or_registers_is_forgotten) {
  const auto held = residency.intern("held"), named = residency.intern("named"), pinned = residency.intern("pinned"),
             sized = residency.intern("sized");
  worker(0, {}, {held});
  residency.refer(named);
  residency.pin(pinned, true);
  residency.set_size(sized, kSize);
  for (int i = 0; i < 100; ++i) residency.intern("few" + std::to_string(i));
  residency.prune();
  EXPECT_EQ(residency.known(), 104u) << "too few to look for any";
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 1'000; ++i) residency.intern("digest" + std::to_string(round) + "." + std::to_string(i));
    residency.prune();
    EXPECT_LE(residency.known(), 2'104u);
  }
  EXPECT_EQ(residency.intern("held"), held);
  EXPECT_EQ(residency.intern("named"), named);
  EXPECT_EQ(residency.intern("pinned"), pinned);
  EXPECT_EQ(residency.intern("sized"), sized);
  EXPECT_THAT(residency.holders(held), ElementsAre(0u));
  residency.unrefer(named);
  residency.pin(pinned, false);
  residency.forget_sizes();  // the registry has it no more
  worker(0, {}, {});
  while (residency.known() < 1'024) residency.intern("more" + std::to_string(residency.known()));
  residency.prune();
  EXPECT_EQ(residency.known(), 0u);
}

class AdapterRouting : public ::testing::Test {
 protected:
  queue::WorkerInfo info(const std::string& name, std::vector<std::string> slots, std::vector<std::string> host = {}) {
    queue::WorkerInfo out;
    out.name = name;
    out.boot = "1";
    out.state = "ready";
    out.models = {"m"};
    out.warm_classes = {"m/256x256x1/none/64/fp32"};
    out.adapter_slots = 2;
    out.host_adapter_bytes = 4 * kSize;
    out.adapter_swap_us = 50'000;
    out.adapters = std::move(slots);
    out.host_adapters = std::move(host);
    return out;
  }
  void update(const std::vector<queue::WorkerInfo>& infos) {
    fleet.update(infos, 0, [](const std::string&) { return ModelId{0}; });
    fleet.define_class(0, "m/256x256x1/none/64/fp32");
  }
  AdapterId adapter(const std::string& name) {
    const auto a = fleet.adapters().intern(name);
    fleet.adapters().set_size(a, kSize);
    return a;
  }
  RouteRequest request(const std::vector<AdapterId>& adapters, std::int64_t lane_work = kSecond) {
    return {
        .class_hash = 7, .prior_us = kSecond, .lane_work_us = lane_work, .adapters = adapters, .tail_us = 10 * kSecond};
  }
  void hold(const std::string& name, int unit, std::int64_t run) {
    fleet.hold(fleet.intern_owner(name + ":1"), {.ref = {"j", unit}, .run_us = run});
  }
  std::string chosen(RoutingPolicy& policy, const RouteRequest& r) {
    policy.begin_round();
    const auto route = policy.choose(fleet, costs, r, 0);
    return route.kind == Route::Kind::kAssign     ? fleet.at(route.worker).name
           : route.kind == Route::Kind::kNoWorker ? "nobody"
                                                  : "wait";
  }
  Fleet fleet{2, 3 * kSecond};
  CostModel costs;
};

TEST_F(AdapterRouting, a_worker_without_slots_takes_no_unit_with_adapters) {
  auto none = info("none", {});
  none.adapter_slots = 0;
  update({none});
  const std::vector<AdapterId> a = {adapter("a")};
  for (const auto name : policy_names()) {
    auto policy = make_policy({.name = std::string(name)});
    EXPECT_EQ(chosen(**policy, request(a)), "nobody") << name;
    EXPECT_EQ(chosen(**policy, request({})), "none") << name;
  }
}

TEST_F(AdapterRouting, the_router_goes_where_the_adapter_is_until_waiting_costs_more_than_loading) {
  for (const char* name : {"a", "x", "y", "z", "u"}) adapter(name);
  update({info("other", {}, {"x", "y", "z", "u"}), info("host", {}, {"a"}), info("slot", {"a"}, {"a"})});
  const std::vector<AdapterId> a = {adapter("a")};
  FinishPolicy policy({.miss_weight = 1.0});
  EXPECT_EQ(chosen(policy, request(a)), "slot");
  hold("slot", 0, 100'000);  // longer than a swap
  EXPECT_EQ(chosen(policy, request(a)), "host");
  hold("host", 1, 400'000);  // slot is free sooner than a load and its weight
  EXPECT_EQ(chosen(policy, request(a)), "slot");
  fleet.release(fleet.intern_owner("slot:1"), {"j", 0}, 0);
  hold("slot", 2, 500'000);
  EXPECT_EQ(chosen(policy, request(a)), "other");
  EXPECT_THAT(policy.choose(fleet, costs, request(a), 0).reason, HasSubstr("adapter load 100 ms; adapter swap 50 ms"));
  FinishPolicy patient({.miss_weight = 8.0});
  EXPECT_EQ(chosen(patient, request(a)), "host");  // rather than push out the last copy of another
  update({info("other", {}, {"x", "y", "z"}), info("host", {}, {"a"}), info("slot", {"a"}, {"a"})});
  EXPECT_EQ(chosen(patient, request(a)), "other");  // there is room
}

TEST_F(AdapterRouting, who_would_become_part_of_the_tail_waits_for_no_holder) {
  for (const char* name : {"a", "x", "y", "z", "u"}) adapter(name);
  update({info("other", {}, {"x", "y", "z", "u"}), info("holder", {"a"}, {"a"})});
  const std::vector<AdapterId> a = {adapter("a")};
  FinishPolicy policy({.miss_weight = 16.0, .wait_runs = 1.0, .tail_part = 0.8});
  const auto waited = [&](std::int64_t us, std::int64_t tail_us) {
    auto r = request(a);
    r.waited_us = us;
    r.tail_us = tail_us;
    return r;
  };
  hold("holder", 0, 600'000);
  EXPECT_EQ(chosen(policy, request(a)), "holder");                     // 0.6 s is less than its run of 1 s
  EXPECT_EQ(chosen(policy, waited(300'000, 10 * kSecond)), "holder");  // 0.15 s of load and swap on the other
  EXPECT_EQ(chosen(policy, waited(600'000, 10 * kSecond)), "other");   // with that it would be more than its run
  EXPECT_EQ(chosen(policy, waited(0, 1'500'000)), "other");            // 0.8 of the tail leaves 0.2 s beside the run
  hold("other", 1, 100'000);
  EXPECT_EQ(chosen(policy, waited(9 * kSecond, 10 * kSecond)), "other");
}

TEST_F(AdapterRouting, short_runs_pass_long_ones_by_no_more_than_the_tail) {
  FinishPolicy policy({.patience = 2.0});
  EXPECT_EQ(policy.patience_us(kSecond, 10 * kSecond), 2 * kSecond);
  EXPECT_EQ(policy.patience_us(8 * kSecond, 10 * kSecond), 10 * kSecond);
  for (const auto name : policy_names()) {
    if (name == "finish") continue;
    const auto baseline = *make_policy({std::string(name), {}});
    EXPECT_EQ(baseline->patience_us(kSecond, kSecond), 0) << name;
    EXPECT_EQ(baseline->reach_us(kSecond, kSecond, kSecond), 0) << name;
    EXPECT_EQ(baseline->yield_us(kSecond, 9 * kSecond, kSecond), 0) << name;
    EXPECT_EQ((*make_policy({std::string(name), {{"patience", 1.5}}}))->patience_us(kSecond, 10 * kSecond), 1'500'000)
        << name;
  }
}

TEST_F(AdapterRouting, who_may_be_passed_and_who_yields_is_bounded_by_the_tail) {
  FinishPolicy policy({.reach = 0.5, .yield = 1.0});
  EXPECT_EQ(policy.reach_us(2 * kSecond, -3 * kSecond, 10 * kSecond), kSecond);  // in time: half its run
  EXPECT_EQ(policy.reach_us(2 * kSecond, 3 * kSecond, 10 * kSecond), 4 * kSecond);
  EXPECT_EQ(policy.reach_us(2 * kSecond, 9 * kSecond, 10 * kSecond), 5 * kSecond);
  EXPECT_EQ(policy.reach_us(2 * kSecond, 9 * kSecond, 0), 0);  // nothing has ended yet
  EXPECT_EQ(policy.yield_us(2 * kSecond, 8 * kSecond, 10 * kSecond), 0);
  EXPECT_EQ(policy.yield_us(2 * kSecond, 9 * kSecond, 10 * kSecond), 10 * kSecond);
  EXPECT_EQ(policy.yield_us(20 * kSecond, 9 * kSecond, 10 * kSecond), 0);  // its own length is no lateness
  EXPECT_EQ(policy.yield_us(2 * kSecond, 9 * kSecond, 0), 0);
  EXPECT_EQ(FinishPolicy({.reach = 0.0}).reach_us(2 * kSecond, 9 * kSecond, 10 * kSecond), 0);
  EXPECT_EQ(FinishPolicy({.yield = 0.0}).yield_us(2 * kSecond, 9 * kSecond, 10 * kSecond), 0);
}

TEST_F(AdapterRouting, a_full_holder_is_waited_for_once_not_by_everybody) {
  adapter("a");
  adapter("b");
  update({info("empty", {}), info("holder", {"a", "b"}, {"a", "b"})});
  hold("holder", 0, 50'000);
  hold("holder", 1, 50'000);
  const std::vector<AdapterId> a = {adapter("a")}, b = {adapter("b")};
  FinishPolicy policy({.miss_weight = 1.0});
  policy.begin_round();
  EXPECT_EQ(policy.choose(fleet, costs, request(a), 0).kind, Route::Kind::kWait);  // 0.1 s against 0.1 + 0.1 + 0.05 s
  const auto other = policy.choose(fleet, costs, request(b), 0);                   // behind a it would be 1.1 s
  ASSERT_EQ(other.kind, Route::Kind::kAssign);
  EXPECT_EQ(fleet.at(other.worker).name, "empty");
  auto aged = request(a);
  aged.may_wait = false;
  EXPECT_EQ(chosen(policy, aged), "empty");
  EXPECT_EQ(chosen(policy, request(a, 10 * kSecond)), "empty");  // the whole lane would not be through there
}

TEST_F(AdapterRouting, baselines_do_what_they_are_named_for) {
  for (const char* name : {"a", "b", "c"}) adapter(name);
  update({info("w0", {"b", "c"}, {"b", "c"}), info("w1", {"a"}, {"a"}), info("w2", {"b", "c"}, {"a", "b", "c"})});
  const std::vector<AdapterId> a = {adapter("a")};
  const auto make = [](const std::string& name, std::map<std::string, double> tunables = {}) {
    return std::move(*make_policy({name, std::move(tunables)}));
  };

  auto turns = make("round_robin");
  std::vector<std::string> order;
  for (int i = 0; i < 4; ++i) order.push_back(chosen(*turns, request(a)));
  EXPECT_THAT(order, ElementsAre("w0", "w1", "w2", "w0"));

  hold("w0", 0, 100'000);
  hold("w1", 1, 300'000);
  EXPECT_EQ(chosen(*make("least_loaded"), request(a)), "w2");

  EXPECT_EQ(chosen(*make("llm_d_ladder", {{"affinity_weight", 4.0}}), request(a)), "w1");  // active there
  EXPECT_EQ(chosen(*make("llm_d_ladder", {{"affinity_weight", 0.1}}), request(a)), "w2");  // shortest queue

  std::set<std::string> seen;
  auto multiplex = make("ray_multiplex");
  for (int i = 0; i < 50; ++i) seen.insert(chosen(*multiplex, request(a)));
  EXPECT_THAT(seen, ElementsAre("w2"));  // of the two that hold it, never twice the same, the less loaded
  for (int unit = 2; unit < 4; ++unit) hold("w2", unit, 1000);
  hold("w1", 4, 1000);
  auto waiting = request(a);
  EXPECT_EQ(chosen(*multiplex, waiting), "wait");
  waiting.waited_us = 2 * kSecond;
  EXPECT_EQ(chosen(*multiplex, waiting), "w0");
}

TEST_F(AdapterRouting, rendezvous_keeps_its_worker_within_the_bound) {
  update({info("w0", {}), info("w1", {}), info("w2", {}), info("w3", {})});
  const std::vector<AdapterId> a = {adapter("a")};
  auto policy = std::move(*make_policy({"bounded_rendezvous", {{"bound", 1.25}}}));
  const auto home = chosen(*policy, request(a));
  for (std::uint64_t other_class = 100; other_class < 120; ++other_class) {
    auto other_shape = request(a);
    other_shape.class_hash = other_class;
    EXPECT_EQ(chosen(*policy, other_shape), home) << "an adapter has one home, whatever is drawn with it";
  }
  hold(home, 0, 5 * kSecond);
  EXPECT_NE(chosen(*policy, request(a)), home);
}

TEST_F(AdapterRouting, equals_on_the_ladder_get_the_same_share) {
  update({info("w0", {}), info("w1", {}), info("w2", {})});
  const std::vector<AdapterId> a = {adapter("a")};
  auto policy = std::move(*make_policy({"llm_d_ladder", {}}));
  std::map<std::string, int> times;
  for (int i = 0; i < 300; ++i) ++times[chosen(*policy, request(a))];
  for (const auto* worker : {"w0", "w1", "w2"}) EXPECT_GT(times[worker], 60) << worker;
}

TEST(RoutingPolicies, names_and_tunables_are_checked) {
  EXPECT_THAT(make_policy({"nope", {}}).error().message, HasSubstr("least_loaded"));
  EXPECT_THAT(make_policy({"finish", {{"x", 1.0}}}).error().message, HasSubstr("miss_weight"));
  EXPECT_THAT(make_policy({"finish", {{"miss_weight", std::nan("")}}}).error().message,
              HasSubstr("miss_weight=nan; it must be a number from 0 to 1000"));
  for (const double patience : {-5.0, -1e300, std::numeric_limits<double>::infinity()}) {
    EXPECT_FALSE(make_policy({"finish", {{"patience", patience}}}).ok()) << patience;
    EXPECT_FALSE(make_policy({"least_loaded", {{"patience", patience}}}).ok()) << patience;
  }
  EXPECT_FALSE(make_policy({"bounded_rendezvous", {{"bound", 0.5}}}).ok()) << "less than the mean is nobody's load";
}

}  // namespace
}  // namespace ditfleet::scheduling
