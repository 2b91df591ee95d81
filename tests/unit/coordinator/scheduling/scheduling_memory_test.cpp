// Workers whose memory limits the size of requests, or that cannot hold all their models at a time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/scheduling/placement/earliest_finish_policy.h"
#include "tests/unit/coordinator/scheduling/scheduler_fixture.h"

namespace ditfleet::scheduling {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kSmallest = 256 * 256, kHalf = 512 * 512, kLarge = 1024 * 1024;

class MemoryTest : public SchedulerTest {
 protected:
  void SetUp() override { scheduler = make_with({}); }
  std::unique_ptr<Scheduler> make_with(const std::function<void(SchedulerOptions&)>& change) {
    SchedulerOptions options;
    options.catalogue = catalogue();
    options.new_nonce = [this] { return "n" + std::to_string(++nonces); };
    if (change) change(options);
    return std::make_unique<Scheduler>(options);
  }
  void let_wait() {
    scheduler = make_with([](SchedulerOptions& options) { options.refuse_too_large = false; });
  }
  queue::WorkerInfo limited(const std::string& name, std::int64_t max_pixels, const std::string& state = "ready") {
    auto info = worker(name, state);
    info.memory["tiny"] = {.limits = {{"resident", kSmallest}, {"block", max_pixels}},
                           .available_bytes = 12'025'908'429,
                           .bytes = 9'000'000'000,
                           .load_us = 400'000};
    return info;
  }
  // Serves two models, of which it holds one at a time.
  queue::WorkerInfo swapping(const std::string& name, bool tiny_is_resident) {
    auto info = worker(name);
    info.models = {"tiny", "other"};
    info.memory["tiny"] = {.bytes = 9'000'000'000, .resident = tiny_is_resident, .load_us = 400'000};
    info.memory["other"] = {.bytes = 9'000'000'000, .resident = !tiny_is_resident, .load_us = 700'000};
    return info;
  }
  void register_workers(const std::vector<queue::WorkerInfo>& infos) {
    scheduler->on_workers(infos, now);
    settle();
  }
  static std::string square(int side) {
    return spec("\"width\":" + std::to_string(side) + ",\"height\":" + std::to_string(side));
  }
  static std::string of_other() { return R"({"model":"other","prompt":"x","seed":1})"; }
  // Ends what is assigned, until nothing is.
  void serve() {
    for (bool any = true; any;) {
      any = false;
      for (const auto& [ref, view] : std::map(store.open)) {
        if (view.state != job::State::kAssigned) continue;
        store.start(ref, now);
        store.finish(ref, now += 500 * kMs);
        any = true;
      }
      settle();
    }
  }
  std::string why(const std::string& job) const { return scheduler->waits_for({job, 0}, now); }
  std::string reason_of(const queue::UnitRef& ref) const {
    const auto at = reasons.find(ref);
    return at == reasons.end() ? "" : at->second;
  }
  // As submit(), but keeps the reason of the assignment.
  void submit_for_reason(const std::string& id, const std::string& text) {
    scheduler->on_intake(std::vector{entry(id, text)}, now);
    const auto actions = scheduler->decide(now);
    for (const auto& batch : actions.assign)
      for (const auto& unit : batch.units) reasons[unit.ref] = unit.reason;
    store.perform(actions, *scheduler, now);
    settle();
  }
  std::map<queue::UnitRef, std::string> reasons;
};

TEST_F(MemoryTest, large_jobs_go_to_the_large_worker_and_small_ones_to_both) {
  register_workers({limited("small", kHalf), limited("large", kLarge)});
  for (int i = 0; i < 10; ++i) {
    submit("L" + std::to_string(i), square(1024));
    submit("s" + std::to_string(i), square(256));
  }
  serve();
  std::map<std::string, int> small, large;
  for (const auto& [ref, owner] : store.assignments) ++(ref.job[0] == 'L' ? large : small)[owner];
  EXPECT_EQ(large["large:1"], 10);
  EXPECT_EQ(large["small:1"], 0);
  EXPECT_GT(small["small:1"], 0);
  EXPECT_GT(small["large:1"], 0);
  EXPECT_TRUE(store.open.empty());
}

TEST_F(MemoryTest, a_full_large_worker_does_not_idle_a_small_one) {
  register_workers({limited("small", kHalf), limited("large", kLarge)});
  for (int side = 592; side <= 1024; side += 16) submit("L" + std::to_string(side), square(side));  // many lanes
  submit("s", square(256));
  EXPECT_EQ(owner_of("s"), "small:1");
  EXPECT_EQ(owner_of("L1024"), "");
  EXPECT_THAT(why("L1024"), HasSubstr("capacity: 1 worker with 'tiny' and memory for 1,048,576 pixels is full"));
}

TEST_F(MemoryTest, the_age_bound_holds_though_an_older_unit_waits_for_the_large_worker) {
  register_workers({limited("small", kHalf), limited("large", kLarge)});
  for (int i = 0; i < 3; ++i) submit("L" + std::to_string(i), square(1024));
  for (int i = 0; i < 2; ++i) submit("first" + std::to_string(i), square(256));
  submit("old", square(512));
  ASSERT_EQ(owner_of("old"), "");
  now += 61'000 * kMs;
  submit("urgent", spec(R"("width":256,"height":256,"priority":9)"));
  auto infos = std::vector{limited("small", kHalf), limited("large", kLarge)};
  scheduler->on_workers(infos, now);
  store.start({"first0", 0}, now);
  store.finish({"first0", 0}, now += 500 * kMs);
  settle();
  EXPECT_EQ(owner_of("old"), "small:1");
  EXPECT_EQ(owner_of("urgent"), "");
}

TEST_F(MemoryTest, a_job_that_no_worker_can_hold_is_rejected_with_the_numbers) {
  register_workers({limited("small", kSmallest), limited("gpu-0", kHalf)});
  submit("1", square(1024));
  ASSERT_EQ(store.rejected.size(), 1u);
  EXPECT_EQ(store.rejected[0].error.code, Code::kInvalidArgument);
  EXPECT_EQ(store.rejected[0].error.param, "width");
  EXPECT_EQ(store.rejected[0].error.message,
            "a 1024×1024 image needs more memory than any worker of model 'tiny' has: at most 262,144 pixels fit "
            "(worker gpu-0, plan block, 11.2 GiB available); use a smaller size");
  submit("2", square(512));
  EXPECT_EQ(owner_of("2"), "gpu-0:1");
}

TEST_F(MemoryTest, a_worker_that_reports_no_limits_rejects_nothing) {
  auto starting = worker("starting", "starting");
  register_workers({limited("small", kHalf), starting});
  submit("1", square(1024));
  EXPECT_TRUE(store.rejected.empty());
  EXPECT_EQ(owner_of("1"), "");
  register_workers({limited("small", kHalf), limited("starting", kLarge)});
  EXPECT_EQ(owner_of("1"), "starting:1");
}

TEST_F(MemoryTest, jobs_wait_while_no_worker_is_registered) {
  submit("1", square(1024));
  EXPECT_TRUE(store.rejected.empty());
  register_workers({limited("large", kLarge)});
  EXPECT_EQ(owner_of("1"), "large:1");
}

TEST_F(MemoryTest, a_queued_unit_goes_to_any_worker_once_the_large_one_has_left) {
  auto draining = limited("large", kLarge, "draining");
  register_workers({limited("small", kHalf), draining});
  submit("1", square(1024));
  EXPECT_EQ(owner_of("1"), "") << "the large worker is registered";
  register_workers({limited("small", kHalf)});
  EXPECT_EQ(owner_of("1"), "small:1") << "fails there with the worker's numbers";
}

TEST_F(MemoryTest, with_larger_workers_on_demand_a_job_waits_for_one) {
  let_wait();
  register_workers({limited("small", kHalf)});
  submit("1", square(1024));
  EXPECT_TRUE(store.rejected.empty());
  EXPECT_EQ(owner_of("1"), "");
  EXPECT_EQ(why("1"),
            "a worker with more memory: it has 1,048,576 pixels, workers with 'tiny' can hold at most 262,144");
  EXPECT_EQ(scheduler->stats().ready, 1u);
  EXPECT_EQ(scheduler->stats().unplaceable, 1u);
  register_workers({limited("small", kHalf), limited("large", kLarge)});
  EXPECT_EQ(owner_of("1"), "large:1");
  EXPECT_EQ(scheduler->stats().unplaceable, 0u);
  serve();
  submit("2", square(1024));
  submit("3", square(1024));
  submit("4", square(1024));
  ASSERT_EQ(owner_of("4"), "");
  register_workers({limited("small", kHalf)});  // the large one leaves
  EXPECT_EQ(owner_of("4"), "");
  EXPECT_THAT(why("4"), HasSubstr("more memory"));
  EXPECT_EQ(scheduler->stats().unplaceable, 3u) << "the units that it held too";
  for (const char* id : {"2", "3", "4"}) store.finish({id, 0}, now, "canceled");
  settle();
  EXPECT_EQ(scheduler->stats().unplaceable, 0u);
}

TEST_F(MemoryTest, units_that_wait_for_a_larger_worker_earn_no_credit) {
  let_wait();
  register_workers({limited("small", kHalf)});
  for (int i = 0; i < 40; ++i) submit("L" + std::to_string(i), square(1024), "a");
  for (int i = 0; i < 40; ++i) submit("b" + std::to_string(i), square(256), "b");
  for (std::size_t i = 0; i < 20; ++i) {  // half of them are served while `a` has no other unit
    store.start(store.assignments[i].first, now);
    store.finish(store.assignments[i].first, now += 500 * kMs);
    settle();
  }
  const auto from = store.assignments.size();
  for (int i = 0; i < 40; ++i) submit("plain" + std::to_string(i), square(256), "a");
  serve();
  ASSERT_GE(store.assignments.size(), from + 16);
  int of_a = 0;
  for (std::size_t i = from; i < from + 16; ++i) of_a += store.assignments[i].first.job.starts_with("plain");
  EXPECT_NEAR(of_a, 8, 2) << "its share from now on";
}

TEST_F(MemoryTest, a_lost_large_unit_drains_no_small_worker) {
  register_workers({limited("small", kHalf), limited("large", kLarge)});
  submit("L", square(1024));
  ASSERT_EQ(owner_of("L"), "large:1");
  store.start({"L", 0}, now);
  submit("s", square(256));
  settle();
  store.lapse({"L", 0}, now);
  settle();
  EXPECT_EQ(owner_of("L"), "large:1");
  serve();
  for (const auto& [ref, owner] : store.assignments) EXPECT_TRUE(ref.job == "s" || owner == "large:1");
}

TEST_F(MemoryTest, a_lost_large_unit_waits_for_the_large_worker_to_be_empty) {
  register_workers({limited("large", kLarge)});
  submit("M", square(1024));
  submit("L", square(1024));
  store.start({"M", 0}, now);
  settle();
  register_workers({limited("large", kLarge), limited("small", kHalf)});
  store.lapse({"L", 0}, now);
  settle();
  EXPECT_EQ(owner_of("L"), "") << "though the small worker is empty";
  submit("s", square(256));
  submit("t", square(256));
  EXPECT_EQ(owner_of("s") + owner_of("t"), "small:1small:1") << "the large worker empties, the small one does not";
  store.finish({"M", 0}, now += 500 * kMs);
  settle();
  EXPECT_EQ(owner_of("L"), "large:1");
}

TEST_F(MemoryTest, lanes_that_no_open_worker_can_hold_cost_one_decision_a_round) {
  struct Counting final : RoutingPolicy {
    Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t at) override {
      ++calls;
      return policy.choose(fleet, costs, request, at);
    }
    EarliestFinishPolicy policy{{}};
    int calls = 0;
  };
  const auto counting = std::make_shared<Counting>();
  scheduler = make_with([&](SchedulerOptions& options) { options.routing = counting; });
  register_workers({limited("small", kHalf), limited("large", kLarge)});
  for (int side = 592; side <= 1024; side += 16) submit("L" + std::to_string(side), square(side));
  counting->calls = 0;
  submit("s", square(256));
  EXPECT_EQ(owner_of("s"), "small:1");
  EXPECT_LE(counting->calls, 4) << "one a round for all of them, one for the small unit";
}

TEST_F(MemoryTest, no_unit_waits_for_a_full_worker_that_cannot_hold_it) {
  auto small = limited("small", kHalf);
  small.warm_classes = {"tiny/1024x1024x1/embedded/64/auto", "tiny/256x256x1/embedded/64/auto"};
  register_workers({small});
  submit("1", square(256));
  submit("2", square(256));
  register_workers({small, limited("large", kLarge)});
  submit("L", square(1024));
  EXPECT_EQ(owner_of("L"), "large:1");
}

TEST_F(MemoryTest, a_unit_moves_to_an_idle_worker_only_if_it_fits_though_larger_ones_wait) {
  register_workers({limited("large", kLarge)});
  submit("1", square(1024));
  submit("2", square(512));
  submit("3", square(1024));
  store.start({"1", 0}, now);
  settle();
  now += 1'000 * kMs;
  auto large = limited("large", kLarge);
  register_workers({large, limited("small", kSmallest)});
  EXPECT_EQ(owner_of("2"), "large:1") << "too large for it";
  register_workers({large, limited("half", kHalf)});
  EXPECT_EQ(owner_of("2"), "half:1") << "though 3 waits and is too large for it";
}

TEST_F(MemoryTest, the_load_of_a_model_counts) {
  register_workers({swapping("a", true), swapping("b", false)});
  submit_for_reason("1", square(256));
  EXPECT_EQ(owner_of("1"), "a:1");
  EXPECT_THAT(reason_of({"1", 0}), Not(HasSubstr("model load")));
  submit_for_reason("2", of_other());
  EXPECT_EQ(owner_of("2"), "b:1");
}

TEST_F(MemoryTest, a_model_that_is_not_on_the_device_loads_once) {
  register_workers({swapping("w", true)});
  submit_for_reason("1", of_other());
  EXPECT_THAT(reason_of({"1", 0}), HasSubstr("; model load 700 ms;"));
  submit_for_reason("2", of_other());
  EXPECT_THAT(reason_of({"2", 0}), Not(HasSubstr("model load"))) << "the unit before it brings the model";
  const auto& held = scheduler->fleet().at(0).held;
  ASSERT_EQ(held.size(), 2u);
  EXPECT_GE(held[0].run_us, held[1].run_us + 700 * kMs) << "the load delays the second";
  scheduler = make_with({});
  scheduler->rebuild(store.views(), {}, {swapping("w", true)}, 0, now);
  EXPECT_EQ(scheduler->fleet().at(0).held[0].load_us, 700 * kMs) << "after a restart too";
}

TEST_F(MemoryTest, a_unit_rather_waits_than_needs_a_long_load) {
  const auto slow = spec(R"("width":1024,"height":1024,"num_inference_steps":40)");
  auto a = swapping("a", true), b = swapping("b", false);
  a.warm_classes = b.warm_classes = {"tiny/1024x1024x1/embedded/64/auto"};
  b.memory["tiny"].load_us = 60'000 * kMs;
  register_workers({a});
  submit("1", slow);
  submit("2", slow);
  store.start({"1", 0}, now);
  settle();
  now += 1'000 * kMs;
  a.heartbeat_ms = b.heartbeat_ms = now / 1000;
  register_workers({a, b});
  EXPECT_TRUE(store.revoked.empty()) << "does not move to the idle worker";
  submit("3", slow);
  EXPECT_EQ(owner_of("3"), "") << "does not go to the idle worker";
  EXPECT_THAT(why("3"), HasSubstr("a full worker that is warm for its class: another takes longer to prepare"));
}

TEST_F(MemoryTest, a_model_that_another_evicts_must_come_back) {
  register_workers({swapping("w", true)});
  submit_for_reason("1", of_other());
  submit_for_reason("2", square(256));
  EXPECT_THAT(reason_of({"2", 0}), HasSubstr("; model load 400 ms;"));
}

TEST_F(MemoryTest, models_that_fit_together_do_not_load) {
  auto both = swapping("w", true);
  both.memory["other"].resident = true;
  register_workers({both});
  submit_for_reason("1", of_other());
  submit_for_reason("2", square(256));
  EXPECT_THAT(reason_of({"1", 0}) + reason_of({"2", 0}), Not(HasSubstr("model load")));
}

TEST_F(MemoryTest, a_load_time_that_was_not_measured_follows_from_the_size) {
  auto info = swapping("w", true);
  info.memory["other"].load_us = 0;
  register_workers({info});
  submit_for_reason("1", of_other());
  EXPECT_THAT(reason_of({"1", 0}), HasSubstr("; model load 450 ms;"));
}

TEST_F(MemoryTest, a_load_does_not_count_as_run) {
  register_workers({swapping("w", true)});
  submit_for_reason("1", of_other());
  store.start({"1", 0}, now);
  store.finish({"1", 0}, now += 1'000 * kMs);  // 700 ms of load, of which at most half the time counts
  settle();
  auto info = swapping("w", false);
  info.warm_classes = {"other/256x256x1/embedded/64/auto"};
  register_workers({info});
  submit_for_reason("2", of_other());
  EXPECT_THAT(reason_of({"2", 0}), HasSubstr("run 500 ms"));
}

TEST_F(MemoryTest, the_reason_names_a_plan_that_is_not_the_fastest_kind) {
  register_workers({limited("w", kLarge)});
  submit_for_reason("1", square(1024));
  EXPECT_THAT(reason_of({"1", 0}), HasSubstr("; plan block;"));
  submit_for_reason("2", square(256));
  EXPECT_THAT(reason_of({"2", 0}), Not(HasSubstr("plan")));
}

TEST_F(MemoryTest, a_worker_that_goes_while_it_holds_a_unit_is_forgotten_safely) {
  register_workers({swapping("w", true), limited("x", kHalf)});
  submit("1", of_other());
  ASSERT_EQ(owner_of("1"), "w:1");
  register_workers({});
  store.finish({"1", 0}, now);
  settle();
  register_workers({limited("y", kHalf)});
  submit("2", square(256));
  EXPECT_EQ(owner_of("2"), "y:1");
}

TEST_F(MemoryTest, a_video_of_too_many_frames_is_rejected_with_what_fits) {
  scheduler = make_with([](SchedulerOptions& options) {
    auto& clips = options.catalogue.models["tiny"];
    clips.media = job::MediaKind::kVideo;
    clips.apply("frames") = {.low = 1, .high = 1024, .multiple_of = 4, .remainder = 1};
  });
  register_workers({limited("small", 49 * kSmallest)});
  submit("fits", spec(R"("width":256,"height":256,"frames":51)"));  // rounded to 49
  EXPECT_EQ(owner_of("fits"), "small:1");
  submit("long", spec(R"("width":256,"height":256,"frames":52)"));
  ASSERT_EQ(store.rejected.size(), 1u);
  const Error& error = store.rejected[0].error;
  EXPECT_EQ(error.code, Code::kInvalidArgument);
  EXPECT_EQ(error.param, "frames");
  EXPECT_THAT(error.message, HasSubstr("a 256×256 video of 53 frames needs more memory"));
  EXPECT_THAT(error.message, HasSubstr("use fewer frames or a smaller size"));
  submit("short", spec(R"("width":256,"height":256,"frames":5)"));
  EXPECT_EQ(store.rejected.size(), 1u);
}

TEST(ClassPixels, are_bounded_for_any_key) {
  const auto pixels = [](const std::string& size) {
    return job::parse_class_key("m/" + size + "/none/64/auto").value().pixels();
  };
  EXPECT_EQ(pixels("832x480x81"), 832 * 480 * 81);
  EXPECT_EQ(pixels("2147483647x2147483647x2147483647"), std::int64_t{1} << 50);
  EXPECT_EQ(pixels("-5x480x81"), 0);
}

}  // namespace
}  // namespace ditfleet::scheduling
