// The baseline routing policies, and making policies by name.
#include "tests/sim/policies.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "tests/unit/coordinator/scheduling/adapter_routing_fixture.h"

namespace ditfleet::simulation {
namespace {

using scheduling::AdapterId;
using scheduling::kSecond;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Policies : public scheduling::AdapterRouting {};

TEST_F(Policies, a_worker_without_adapter_slots_gets_no_unit_with_adapters) {
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

TEST_F(Policies, baselines_keep_the_order_of_arrival) {
  for (const auto name : policy_names()) {
    EXPECT_EQ((*make_policy({std::string(name), {}}))->due_after_us(kSecond) == 0, name != "finish") << name;
  }
}

TEST_F(Policies, each_baseline_follows_its_rule) {
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
  EXPECT_THAT(seen, ElementsAre("w2"));  // the less loaded of the two holders; never draws one twice
  for (int unit = 2; unit < 4; ++unit) hold("w2", unit, 1000);
  hold("w1", 4, 1000);
  auto waiting = request(a);
  EXPECT_EQ(chosen(*multiplex, waiting), "wait");
  waiting.waited_us = 2 * kSecond;
  EXPECT_EQ(chosen(*multiplex, waiting), "w0");
}

TEST_F(Policies, rendezvous_hashing_keeps_its_worker_within_the_bound) {
  update({info("w0", {}), info("w1", {}), info("w2", {}), info("w3", {})});
  const std::vector<AdapterId> a = {adapter("a")};
  auto policy = std::move(*make_policy({"bounded_rendezvous", {{"bound", 1.25}}}));
  const auto home = chosen(*policy, request(a));
  for (std::uint64_t other_class = 100; other_class < 120; ++other_class) {
    auto other_shape = request(a);
    other_shape.lane_hash = other_class;
    EXPECT_EQ(chosen(*policy, other_shape), home) << "an adapter has one home for all classes";
  }
  hold(home, 0, 5 * kSecond);
  EXPECT_NE(chosen(*policy, request(a)), home);
}

TEST_F(Policies, equal_scores_on_the_ladder_get_equal_shares) {
  update({info("w0", {}), info("w1", {}), info("w2", {})});
  const std::vector<AdapterId> a = {adapter("a")};
  auto policy = std::move(*make_policy({"llm_d_ladder", {}}));
  std::map<std::string, int> times;
  for (int i = 0; i < 300; ++i) ++times[chosen(*policy, request(a))];
  for (const auto* worker : {"w0", "w1", "w2"}) EXPECT_GT(times[worker], 60) << worker;
}

TEST(MakePolicy, checks_names_and_tunables) {
  EXPECT_THAT(make_policy({"nope", {}}).error().message, HasSubstr("least_loaded"));
  EXPECT_THAT(make_policy({"least_loaded", {{"x", 1.0}}}).error().message, HasSubstr("it has none"));
  EXPECT_THAT(make_policy({"finish", {{"x", 1.0}}}).error().message, HasSubstr("load_weight"));
  EXPECT_THAT(make_policy({"finish", {{"load_weight", std::nan("")}}}).error().message,
              HasSubstr("load_weight=nan; it must be a number from 0 to 1000"));
  for (const double weight : {-5.0, -1e300, std::numeric_limits<double>::infinity()}) {
    EXPECT_FALSE(make_policy({"finish", {{"due_runs", weight}}}).ok()) << weight;
    EXPECT_FALSE(make_policy({"llm_d_ladder", {{"affinity_weight", weight}}}).ok()) << weight;
  }
  EXPECT_FALSE(make_policy({"bounded_rendezvous", {{"bound", 0.5}}}).ok()) << "below the mean";
}

}  // namespace
}  // namespace ditfleet::simulation
