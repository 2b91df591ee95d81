#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "coordinator/scheduling/placement/cost_model.h"
#include "coordinator/scheduling/placement/earliest_finish_policy.h"
#include "coordinator/scheduling/placement/fleet.h"
#include "coordinator/scheduling/placement/rendezvous_hash.h"
#include "coordinator/scheduling/service/leadership.h"

namespace ditfleet::scheduling {
namespace {

constexpr std::int64_t kSecond = 1'000'000;

queue::WorkerInfo worker_info(const std::string& name, std::vector<std::string> warm = {}) {
  queue::WorkerInfo info;
  info.name = name;
  info.boot = "b1";
  info.state = "ready";
  info.models = {"m"};
  info.warm_classes = std::move(warm);
  info.heartbeat_ms = 1;
  return info;
}

class RouterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fleet.define_class(0, "m/256x256x1/none/64/fp32");
    fleet.define_class(1, "m/512x512x1/none/64/fp32");
  }
  void update(const std::vector<queue::WorkerInfo>& infos, std::int64_t now = 0) {
    fleet.update(infos, now, [](const std::string& name) { return name == "m" ? ModelId{0} : ModelId{1}; });
  }
  Route route(std::int64_t now = 0, std::int64_t lane_work = kSecond, bool may_wait = true) {
    return EarliestFinishPolicy({}).choose(
        fleet, costs,
        {.lane_hash = rendezvous_hash("class"), .prior_us = kSecond, .lane_work_us = lane_work, .may_wait = may_wait},
        now);
  }
  void hold(const std::string& name, int unit, std::int64_t run, std::int64_t now = 0) {
    fleet.hold(fleet.intern_owner(name + ":b1"), {.ref = {"j", unit}, .run_us = run, .assigned_us = now});
  }
  std::string name_of(const Route& r) { return fleet.at(r.worker).name; }

  Fleet fleet{2, 3 * kSecond};
  CostModel costs;
};

TEST_F(RouterTest, no_worker_has_the_model) {
  auto other = worker_info("w");
  other.models = {"another"};
  update({other});
  EXPECT_EQ(route().kind, Route::Kind::kNoWorker);
}

TEST_F(RouterTest, silent_draining_and_starting_workers_get_no_unit) {
  auto draining = worker_info("draining"), starting = worker_info("starting"), silent = worker_info("silent");
  draining.state = "draining";
  starting.state = "starting";
  draining.heartbeat_ms = starting.heartbeat_ms = 10'000;
  update({draining, starting, silent}, 10 * kSecond);
  EXPECT_EQ(route(10 * kSecond).kind, Route::Kind::kNoWorker);
}

TEST_F(RouterTest, a_warm_worker_is_preferred_until_its_queue_exceeds_the_cold_cost) {
  // The prior of a cold class is half a run: 0.5 s.
  update({worker_info("cold"), worker_info("warm", {"m/256x256x1/none/64/bf16"})});  // precision does not matter
  EXPECT_EQ(name_of(route()), "warm");
  hold("warm", 0, 400'000);
  auto r = route();
  EXPECT_EQ(name_of(r), "warm");
  EXPECT_FALSE(r.cold);
  EXPECT_NE(r.reason.find("warm; free in 400 ms + run 1 s"), std::string::npos) << r.reason;
  fleet.release(fleet.intern_owner("warm:b1"), {"j", 0}, 0);
  hold("warm", 1, 600'000);
  r = route();
  EXPECT_EQ(name_of(r), "cold");
  EXPECT_TRUE(r.cold);
  EXPECT_EQ(r.cold_us, 500'000);
}

TEST_F(RouterTest, a_full_warm_worker_is_waited_for_only_while_the_whole_lane_gains) {
  update({worker_info("cold"), worker_info("warm", {"m/256x256x1/none/64/fp32"})});
  costs.observe(0, 0, fleet.intern_owner("warm:b1"), kSecond, kSecond, false);
  for (int i = 0; i < 2; ++i)
    costs.observe(0, 0, fleet.intern_owner("cold:b1"), kSecond, 6 * kSecond, true);  // cold: 5 s
  hold("warm", 0, kSecond);
  hold("warm", 1, kSecond);
  EXPECT_EQ(route(0, kSecond).kind, Route::Kind::kWait);           // ends in 3 s, cold in 6 s
  EXPECT_EQ(route(0, kSecond, false).kind, Route::Kind::kAssign);  // must not wait
  const auto spilled = route(0, 10 * kSecond);
  EXPECT_EQ(spilled.kind, Route::Kind::kAssign);
  EXPECT_EQ(name_of(spilled), "cold");
}

TEST_F(RouterTest, full_workers_have_no_capacity) {
  update({worker_info("a")});
  hold("a", 0, 1);
  hold("a", 1, 1);
  EXPECT_EQ(route().kind, Route::Kind::kNoCapacity);
}

TEST_F(RouterTest, ties_go_by_rendezvous_hash_and_stay_when_other_workers_leave) {
  std::vector<queue::WorkerInfo> infos;
  for (int i = 0; i < 8; ++i) infos.push_back(worker_info("w" + std::to_string(i)));
  update(infos);
  const auto pick = [&](const std::string& cls) {
    return fleet
        .at(EarliestFinishPolicy({})
                .choose(fleet, costs, {.lane_hash = rendezvous_hash(cls), .prior_us = kSecond, .lane_work_us = kSecond},
                        0)
                .worker)
        .name;
  };
  std::map<std::string, std::string> before;
  std::set<std::string> used;
  for (int i = 0; i < 100; ++i) {
    const auto cls = "class" + std::to_string(i);
    before[cls] = pick(cls);
    used.insert(before[cls]);
  }
  EXPECT_EQ(used.size(), 8u);
  infos.erase(infos.begin() + 3);
  update(infos);
  for (const auto& [cls, name] : before) {
    if (name != "w3") {
      EXPECT_EQ(pick(cls), name) << cls;
    }
  }
}

TEST_F(RouterTest, an_overrunning_unit_delays_the_units_behind_it) {
  update({worker_info("a")});
  hold("a", 0, kSecond);
  fleet.started(0, {"j", 0}, 0);
  hold("a", 1, 2 * kSecond);
  EXPECT_EQ(fleet.load(0).start_us(500'000), 3 * kSecond);
  EXPECT_EQ(fleet.load(0).start_us(10 * kSecond), 12 * kSecond);
}

TEST_F(RouterTest, open_workers_are_ready_have_capacity_and_are_sorted_by_predicted_end) {
  std::mt19937 random(11);
  int units = 0;
  for (int i = 0; i < 300; ++i) {
    if (random() % 10 == 0) {
      std::vector<queue::WorkerInfo> infos;
      for (int w = 0; w < 6; ++w) {
        if (random() % 5 == 0) continue;
        infos.push_back(worker_info("w" + std::to_string(w)));
        if (random() % 4 == 0) infos.back().state = "draining";
      }
      update(infos);
    }
    const auto w = fleet.intern_owner("w" + std::to_string(random() % 6) + ":b1");
    if (random() % 2 == 0) {
      fleet.hold(
          w, {.ref = {"j", units++}, .run_us = 1 + static_cast<std::int64_t>(random() % kSecond), .assigned_us = i});
    } else if (!fleet.at(w).held.empty()) {
      fleet.release(w, fleet.at(w).held.front().ref, i);
    }
    Fleet::OpenWorkers expected;
    for (const auto each : fleet.with_model(0)) {
      const auto& worker = fleet.at(each);
      if (worker.state == WorkerState::kReady && static_cast<int>(worker.held.size()) < worker.capacity)
        expected.emplace(fleet.load(each).free_at_us, each);
    }
    ASSERT_EQ(fleet.open_workers(0), expected) << i;
  }
}

TEST_F(RouterTest, a_worker_is_warm_for_the_classes_it_reports_and_holds) {
  std::mt19937 random(5);
  const auto key = [](std::size_t i) {
    return "m/" + std::to_string(64 + 16 * (i / 2)) + "x64x1/none/64/" + (i % 2 == 0 ? "fp32" : "auto");
  };  // pairs that differ in precision only
  std::vector<std::size_t> shape_of(12);
  const auto define = [&](ClassId c) { fleet.define_class(c, key(shape_of[c] = random() % 20)); };
  for (ClassId c = 0; c < shape_of.size(); ++c) define(c);
  for (int round = 0; round < 200; ++round) {
    define(random() % shape_of.size());
    std::vector<queue::WorkerInfo> infos;
    for (int w = 0; w < 3; ++w) {
      infos.push_back(worker_info("w" + std::to_string(w)));
      for (std::size_t i = 0; i < 20; ++i) {
        if (random() % 3 == 0) infos.back().warm_classes.push_back(key(i));
      }
    }
    const auto holder = fleet.intern_owner("w0:b1");
    const queue::UnitRef ref{"j", round};
    const ClassId held = random() % shape_of.size();
    fleet.hold(holder, {.ref = ref, .cls = held, .run_us = 1});
    update(infos);
    for (int w = 0; w < 3; ++w) {
      const auto id = fleet.intern_owner("w" + std::to_string(w) + ":b1");
      for (ClassId c = 0; c < shape_of.size(); ++c) {
        const auto& reported = infos[static_cast<std::size_t>(w)].warm_classes;
        const bool warm = std::any_of(reported.begin(), reported.end(),
                                      [&](const auto& k) { return shape_key(k) == shape_key(key(shape_of[c])); });
        ASSERT_EQ(fleet.is_warm(c, id), warm || (id == holder && c == held)) << round << " w" << w << " class " << c;
      }
    }
    fleet.release(holder, ref, 0);
  }
}

TEST_F(RouterTest, another_incarnation_of_a_worker_is_another_worker) {
  update({worker_info("a")});
  hold("a", 0, kSecond);
  auto again = worker_info("a");
  again.boot = "b2";
  update({again});
  EXPECT_EQ(fleet.at(fleet.intern_owner("a:b1")).state, WorkerState::kGone);
  EXPECT_EQ(fleet.at(fleet.intern_owner("a:b2")).state, WorkerState::kReady);
  EXPECT_TRUE(fleet.at(fleet.intern_owner("a:b2")).held.empty());
}

std::int64_t prior_us(const job::ShapeClass& shape, int steps) {
  return prior_run_us(shape, job::tokens_of(shape, job::ModelEntry()), steps);
}

TEST(CostModel, prior_orders_shapes) {
  job::ShapeClass small{.model = "m", .width = 512, .height = 512}, large{.model = "m", .width = 1024, .height = 1024};
  auto guided = large;
  guided.guidance = job::GuidanceKind::kTrueCfg;
  EXPECT_LT(prior_us(small, 28), prior_us(large, 28));
  EXPECT_LT(prior_us(large, 4), prior_us(large, 28));
  EXPECT_NEAR(static_cast<double>(prior_us(guided, 28)) / static_cast<double>(prior_us(large, 28)), 2.0, 0.05);
  EXPECT_GT(prior_us({.width = 1 << 30, .height = 1 << 30, .frames = 1 << 30}, 200), 0);
}

// Runs of one model, whose classes differ in size. A class is known once it ran.
struct SizedRuns {
  CostModel costs;
  job::ModelEntry model;
  int steps = 50;
  std::function<double(const job::ShapeClass&)> step_us;  // of the device

  std::int64_t tokens(const job::ShapeClass& shape) const { return job::tokens_of(shape, model); }
  std::int64_t prior(const job::ShapeClass& shape) const { return prior_run_us(shape, tokens(shape), steps); }
  void run(ClassId c, const job::ShapeClass& shape, double noise = 1) {
    costs.define_class(c, tokens(shape));
    costs.observe(c, 0, 0, prior(shape), std::llround(steps * step_us(shape) * noise), false);
  }
  // Predicted ÷ what it will take, of a class that did not run yet.
  double error(const job::ShapeClass& shape) {
    const auto unseen = costs.unseen_run_us(0, tokens(shape), prior(shape));
    costs.define_class(99, tokens(shape));
    EXPECT_EQ(costs.typical_run_us(99, 0, prior(shape)), unseen);
    costs.forget_class(99);
    return static_cast<double>(unseen) / (steps * step_us(shape));
  }
};

job::ShapeClass video_of(int frames) {
  return {.model = "m", .width = 832, .height = 480, .frames = frames, .guidance = job::GuidanceKind::kTrueCfg};
}

// A forward pass takes 1.400 s with 49 frames and 2.691 s with 81, measured at 832×480. A step has two.
TEST(CostModel, one_length_of_video_predicts_others) {
  SizedRuns runs{.step_us = [](const job::ShapeClass& shape) { return 2e6 * (shape.frames == 49 ? 1.400 : 2.691); }};
  runs.model.apply("frames") = {.low = 1, .high = 1024, .multiple_of = 4, .remainder = 1};
  runs.run(0, video_of(49));
  EXPECT_NEAR(runs.error(video_of(81)), 1, 0.1);
  SizedRuns reverse{.step_us = runs.step_us};
  reverse.model = runs.model;
  reverse.run(0, video_of(81));
  EXPECT_NEAR(reverse.error(video_of(49)), 1, 0.1);
}

TEST(CostModel, two_lengths_of_video_predict_a_longer_one_from_noisy_runs) {
  for (const double attention : {0.3, 1.0, 3.0, 5.0}) {  // the device's cost of attention, relative to this model's
    for (const double first : {0.97, 1.0, 1.03}) {
      for (const double second : {0.97, 1.0, 1.03}) {
        SizedRuns runs;
        runs.model.apply("frames") = {.low = 1, .high = 1024, .multiple_of = 4, .remainder = 1};
        runs.step_us = [&](const job::ShapeClass& shape) {
          const double t = static_cast<double>(shape.width) * shape.height / 256 * ((shape.frames - 1) / 4 + 1);
          return 2 * (47.7 * t + 0.00105 * attention * t * t);
        };
        runs.run(0, video_of(25), first);
        runs.run(1, video_of(49), second);
        EXPECT_NEAR(runs.error(video_of(81)), 1, 0.25) << attention << " " << first << " " << second;
        const auto known = runs.costs.typical_run_us(0, 0, runs.prior(video_of(25)));
        runs.run(1, video_of(49), 5);
        EXPECT_EQ(runs.costs.typical_run_us(0, 0, runs.prior(video_of(25))), known) << "a known class has its own runs";
      }
    }
  }
}

// The steps of tests/sim/h200.json.
TEST(CostModel, two_sizes_of_images_predict_others) {
  SizedRuns runs{.steps = 28};
  runs.step_us = [&](const job::ShapeClass& shape) {
    const auto n = static_cast<double>(runs.tokens(shape));
    return 22.2416 * n + 0.00087362 * n * n;
  };
  const auto image = [](int side) { return job::ShapeClass{.model = "m", .width = side, .height = side}; };
  runs.run(0, image(512));
  runs.run(1, image(1024));
  for (const int side : {256, 768, 1536, 2048}) EXPECT_NEAR(runs.error(image(side)), 1, 0.12) << side;
}

TEST(CostModel, sizes_that_hardly_differ_do_not_extrapolate_noise) {
  SizedRuns runs;
  runs.model.apply("frames") = {.low = 1, .high = 1024, .multiple_of = 4, .remainder = 1};
  runs.step_us = [&](const job::ShapeClass& shape) { return 1e-2 * static_cast<double>(runs.prior(shape)); };
  runs.run(0, video_of(45), 1.03);
  runs.run(1, video_of(49), 0.97);
  for (const int frames : {5, 81, 161}) EXPECT_NEAR(runs.error(video_of(frames)), 1, 0.25) << frames;
}

TEST(CostModel, observed_runs_correct_the_prior) {
  CostModel costs;
  EXPECT_EQ(costs.run_us(0, 0, 0, 1'000), 1'000);
  EXPECT_FALSE(costs.observed(0));
  costs.observe(0, 0, 0, 1'000, 100, false);
  EXPECT_TRUE(costs.observed(0));
  EXPECT_EQ(costs.run_us(0, 0, 0, 1'000), 100);
  EXPECT_EQ(costs.run_us(5, 0, 3, 1'000), 100);         // an unknown class and worker: the model's mean
  EXPECT_EQ(costs.run_us(0, 1, 0, 1'000), 100);         // the class and worker decide, not the model index
  EXPECT_EQ(costs.typical_run_us(9, 1, 1'000), 1'000);  // another model is not corrected
  costs.observe(0, 0, 1, 1'000, 400, false);            // a slower worker
  EXPECT_GT(costs.run_us(7, 0, 1, 1'000), costs.run_us(7, 0, 0, 1'000));
  for (int i = 0; i < 50; ++i) costs.observe(0, 0, 0, 1'000, 50, false);
  EXPECT_NEAR(static_cast<double>(costs.run_us(0, 0, 0, 1'000)), 50.0, 2.0);
}

TEST(CostModel, runs_with_skipped_steps_predict_only_their_class) {
  constexpr ClassId kFull = 0, kCached = 1, kOther = 2;
  CostModel costs;
  for (const ClassId c : {kFull, kCached, kOther}) costs.define_class(c, 4'096, /*skips=*/c == kCached);
  costs.observe(kCached, 0, 0, 1'000, 400, false);
  EXPECT_EQ(costs.typical_run_us(kCached, 0, 1'000), 400);
  EXPECT_EQ(costs.typical_run_us(kOther, 0, 1'000), 400) << "nothing else is known";
  costs.observe(kFull, 0, 0, 1'000, 1'000, false);
  for (int i = 0; i < 20; ++i) costs.observe(kCached, 0, 0, 1'000, 400, false);
  EXPECT_EQ(costs.typical_run_us(kCached, 0, 1'000), 400);
  EXPECT_EQ(costs.typical_run_us(kFull, 0, 1'000), 1'000);
  EXPECT_EQ(costs.typical_run_us(kOther, 0, 1'000), 1'000);
}

TEST(CostModel, cold_cost_is_what_a_first_run_takes_beyond_the_prediction) {
  CostModel costs;
  EXPECT_EQ(costs.cold_us(0, 1'000), 500);     // the prior
  costs.observe(0, 0, 0, 1'000, 3'000, true);  // nothing to compare with: counts as a run
  EXPECT_EQ(costs.typical_run_us(0, 0, 1'000), 3'000);
  costs.observe(0, 0, 0, 1'000, 1'000, false);  // the warm run corrects it
  EXPECT_EQ(costs.run_us(0, 0, 0, 1'000), 1'000);
  costs.observe(0, 0, 1, 1'000, 5'000, true);
  EXPECT_GT(costs.cold_us(0, 1'000), 2'000);
  EXPECT_EQ(costs.run_us(0, 0, 0, 1'000), 1'000);  // unchanged by the cold run
}

TEST(CostModel, a_cold_run_confirms_no_prediction) {
  CostModel costs;
  costs.seed(0, 0, 1'000'000, 500'000);
  EXPECT_FALSE(costs.confirmed(0));
  costs.observe(0, 0, 0, 1'000'000, 900'000, true);  // the worker's first of its class
  EXPECT_TRUE(costs.observed(0));
  EXPECT_FALSE(costs.confirmed(0));
  costs.observe(0, 0, 0, 1'000'000, 400'000, false);
  EXPECT_TRUE(costs.confirmed(0));
}

TEST(CostModel, observed_runs_replace_a_seed) {
  CostModel costs;
  costs.seed(0, 0, 1'000, 9'000);
  EXPECT_EQ(costs.typical_run_us(0, 0, 1'000), 9'000);
  EXPECT_FALSE(costs.observed(0));
  costs.observe(0, 0, 0, 1'000, 200, false);
  EXPECT_EQ(costs.typical_run_us(0, 0, 1'000), 200);
  costs.seed(0, 0, 1'000, 9'000);
  EXPECT_EQ(costs.typical_run_us(0, 0, 1'000), 200);
}

TEST(Leadership, a_lease_starts_when_it_was_requested) {
  Leadership lead(3'000'000);
  EXPECT_FALSE(lead.leader_known(0));
  EXPECT_EQ(lead.on_answer(7, 0, 500'000), Leadership::Change::kGained);
  EXPECT_EQ(lead.epoch(), 7);
  EXPECT_EQ(lead.next_call_us(), 1'000'000);
  EXPECT_EQ(lead.on_tick(2'999'999), Leadership::Change::kNone);
  EXPECT_EQ(lead.on_tick(3'000'000), Leadership::Change::kLost);
  EXPECT_FALSE(lead.leading());
}

TEST(Leadership, renewals_keep_it_and_another_leader_ends_it) {
  Leadership lead(3'000'000);
  EXPECT_EQ(lead.on_answer(7, 0, 10), Leadership::Change::kGained);
  EXPECT_EQ(lead.on_answer(7, 1'000'000, 1'000'010), Leadership::Change::kNone);
  EXPECT_EQ(lead.on_tick(3'500'000), Leadership::Change::kNone);
  EXPECT_EQ(lead.on_answer(0, 3'600'000, 3'600'010), Leadership::Change::kLost);
  EXPECT_TRUE(lead.leader_known(3'600'020));
  EXPECT_EQ(lead.on_answer(9, 5'000'000, 5'000'010), Leadership::Change::kGained);
}

TEST(Leadership, a_new_epoch_is_a_loss_before_it_is_a_gain) {
  Leadership lead(3'000'000);
  EXPECT_EQ(lead.on_answer(7, 0, 10), Leadership::Change::kGained);
  EXPECT_EQ(lead.on_answer(9, 1'000'000, 1'000'010), Leadership::Change::kLost);
  EXPECT_EQ(lead.on_answer(9, 1'000'020, 1'000'030), Leadership::Change::kGained);
  EXPECT_EQ(lead.on_fenced(1'100'000), Leadership::Change::kLost);
}

TEST(Leadership, an_answer_after_the_lease_has_ended_grants_nothing) {
  Leadership lead(3'000'000);
  EXPECT_EQ(lead.on_answer(7, 0, 3'100'000), Leadership::Change::kNone);
  EXPECT_FALSE(lead.leading());
}

}  // namespace
}  // namespace ditfleet::scheduling
