// The forecast that the leader publishes: the backlog of each model, and when workers will be empty.
#include "tests/unit/coordinator/scheduling/scheduler_fixture.h"

namespace ditfleet::scheduling {
namespace {

class ForecastTest : public SchedulerTest {
 protected:
  queue::FleetForecast::Model tiny(std::size_t unread = 0) const {
    return scheduler->forecast(unread, now).models.at("tiny");
  }
  // The worker starts the job's unit now, which runs that long.
  void run(const std::string& id, std::int64_t us) {
    store.start({id, 0}, now);
    settle();
    now += us;
    store.finish({id, 0}, now);
    settle();
  }
};

TEST_F(ForecastTest, without_jobs_there_is_no_backlog) {
  EXPECT_EQ(tiny(), queue::FleetForecast::Model());
  EXPECT_EQ(scheduler->forecast(0, now).models.size(), 2u) << "every model of the catalogue is listed";
}

TEST_F(ForecastTest, it_works_without_workers_and_without_a_run) {
  submit("j", spec(R"("n":3)"));
  const auto three = tiny();
  EXPECT_EQ(three.units, 3);
  EXPECT_EQ(three.ready_workers, 0);
  submit("k");
  EXPECT_GT(three.backlog_us, 0);
  EXPECT_EQ(3 * tiny().backlog_us, 4 * three.backlog_us);
  EXPECT_EQ(scheduler->forecast(0, now).models.at("other").backlog_us, 0);
}

// Forward passes of 0.646 s with 25 frames, 1.400 s with 49 and 2.691 s with 81; a step has two. The first run of a
// class takes 3 s longer.
TEST_F(ForecastTest, shorter_videos_predict_the_first_long_one) {
  SchedulerOptions options;
  options.catalogue = catalogue();
  auto& clips = options.catalogue.models["tiny"];
  clips.media = job::MediaKind::kVideo;
  clips.apply("frames") = {.low = 1, .high = 1024, .multiple_of = 4, .remainder = 1};
  options.new_nonce = [this] { return "n" + std::to_string(++nonces); };
  scheduler = std::make_unique<Scheduler>(options);
  workers({"w"});
  const auto video = [](int frames) {
    return spec(
        R"("width":832,"height":480,"num_inference_steps":50,"true_cfg_scale":5,"negative_prompt":"","frames":)" +
        std::to_string(frames));
  };
  submit("a", video(25));
  run("a", 64'600'000 + 3'000'000);
  submit("b", video(49));
  run("b", 140'000'000 + 3'000'000);
  submit("c", video(82));  // rounded to 81
  EXPECT_NEAR(static_cast<double>(store.open.at({"c", 0}).cost_us), 269.1e6, 0.25 * 269.1e6);
  store.start({"c", 0}, now);
  settle();
  const auto end_ms = scheduler->ends_ms().at("w:1");
  EXPECT_NEAR(static_cast<double>(end_ms * 1000 - now), 269.1e6, 0.25 * 269.1e6);
  now += 100'000'000;
  EXPECT_NEAR(static_cast<double>(tiny().backlog_us), 169.1e6, 0.25 * 269.1e6);
}

TEST_F(ForecastTest, jobs_that_were_not_read_count_as_default_jobs) {
  submit("j");
  const auto one = tiny();
  const auto all = tiny(9);
  EXPECT_EQ(all.units, 10);
  EXPECT_EQ(all.backlog_us, 10 * one.backlog_us) << "the job has the model's defaults";
  EXPECT_EQ(scheduler->pending_jobs(), 0u);
  scheduler->on_intake(std::vector{entry("x"), entry("y")}, now);
  EXPECT_EQ(tiny().units, 3) << "read, but not admitted yet";
}

TEST_F(ForecastTest, a_plain_entry_is_pending_until_it_is_admitted) {
  auto plain = entry("x-1-0");
  plain.raw = true;
  scheduler->on_intake(std::vector{plain}, now);
  EXPECT_EQ(scheduler->pending_jobs(), 1u);
  EXPECT_EQ(tiny().units, 1);
  settle();
  EXPECT_EQ(scheduler->pending_jobs(), 0u);
}

TEST_F(ForecastTest, a_running_unit_counts_for_what_remains) {
  submit("first");
  auto info = worker("a");
  info.warm_classes = {store.open.at({"first", 0}).class_key};
  scheduler->on_workers({info}, now);
  settle();
  run("first", 2'000'000);
  for (int i = 0; i < 20; ++i) {
    submit(std::to_string(i));
    run(std::to_string(i), 2'000'000);
  }
  info.heartbeat_ms = now / 1000;
  scheduler->on_workers({info}, now);
  submit("j");
  submit("k");
  EXPECT_NEAR(static_cast<double>(tiny().backlog_us), 4e6, 0.3e6) << "both are assigned";
  EXPECT_TRUE(scheduler->ends_ms().empty()) << "none has started";
  store.start({"j", 0}, now);
  settle();
  const auto start = now;
  now += 1'500'000;
  EXPECT_NEAR(static_cast<double>(tiny().backlog_us), 2.5e6, 0.3e6);
  const auto ends = scheduler->ends_ms();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends.begin()->first, "a:1");
  EXPECT_NEAR(static_cast<double>(ends.begin()->second - start / 1000), 2000, 150) << "without the unit that waits";
  now += 1'000'000;  // longer than predicted
  const auto late = tiny();
  EXPECT_NEAR(static_cast<double>(late.backlog_us), 2e6, 0.3e6);
  store.finish({"j", 0}, now);
  settle();
  store.start({"k", 0}, now);
  settle();
  now += 60'000'000;
  EXPECT_GT(tiny().backlog_us, 0) << "work is left, so an autoscaler must keep a worker";
  EXPECT_EQ(tiny().units, 1);
  store.finish({"k", 0}, now);
  settle();
  EXPECT_EQ(tiny().backlog_us, 0);
  EXPECT_TRUE(scheduler->ends_ms().empty());
}

TEST_F(ForecastTest, only_ready_workers_are_counted) {
  auto starting = worker("b", "starting"), other = worker("c");
  other.models = {"tiny", "other", "unconfigured"};
  scheduler->on_workers({worker("a"), starting, worker("d", "draining"), other}, now);
  const auto forecast = scheduler->forecast(0, now);
  EXPECT_EQ(forecast.ready_workers, 2);
  EXPECT_EQ(forecast.models.at("tiny").ready_workers, 2);
  EXPECT_FALSE(forecast.models.contains("unconfigured")) << "labels are bounded";
}

class OutlookTest : public ForecastTest {
 protected:
  void warm(const std::vector<std::string>& names) {
    if (class_key.empty()) {
      submit("any");
      class_key = store.open.at({"any", 0}).class_key;
    }
    std::vector<queue::WorkerInfo> infos;
    for (const auto& name : names) {
      infos.push_back(worker(name));
      infos.back().warm_classes = {class_key};
    }
    scheduler->on_workers(infos, now);
    settle();
  }
  // A warm worker, on which runs of 2 s were observed.
  void observe() {
    warm({"a"});
    run("any", 2'000'000);
    for (int i = 0; i < 20; ++i) {
      submit("seen" + std::to_string(i));
      run("seen" + std::to_string(i), 2'000'000);
    }
    warm({"a"});
  }
  std::map<std::string, queue::JobOutlook> outlook(std::size_t most = 1000) const {
    return scheduler->outlook(most, now);
  }
  // The jobs that wait, in the order of their positions, which are 0, 1, 2 …
  std::vector<std::string> by_position() const {
    std::map<std::int64_t, std::string> jobs;
    for (const auto& [id, one] : outlook()) {
      if (one.position < 0) continue;
      EXPECT_TRUE(jobs.emplace(one.position, id).second) << id << ": " << one.position;
    }
    std::vector<std::string> out;
    for (const auto& [position, id] : jobs) {
      EXPECT_EQ(position, static_cast<std::int64_t>(out.size()));
      out.push_back(id);
    }
    return out;
  }
  // Runs all units, each for `us`, on the only worker; returns the jobs in the order of their first starts.
  std::vector<std::string> run_all(std::int64_t us) {
    std::vector<std::string> out;
    for (std::size_t next = store.assignments.size() - held(); next < store.assignments.size(); ++next) {
      const auto ref = store.assignments[next].first;
      if (std::find(out.begin(), out.end(), ref.job) == out.end()) out.push_back(ref.job);
      store.start(ref, now);
      settle();
      now += us;
      warm({"a"});  // a heartbeat
      store.finish(ref, now);
      settle();
    }
    return out;
  }
  std::size_t held() const {
    return static_cast<std::size_t>(std::count_if(store.open.begin(), store.open.end(),
                                                  [](const auto& unit) { return !unit.second.owner.empty(); }));
  }
  std::string class_key;
};

TEST_F(OutlookTest, jobs_start_in_the_order_of_their_positions_and_end_when_predicted) {
  observe();
  for (int i = 0; i < 12; ++i) {
    submit("j" + std::to_string(i), spec(R"("priority":)" + std::to_string(i % 3 - 1)));
    now += 10 * kMs;
  }
  submit("two", spec(R"("n":2)"));
  const auto expected = by_position();
  const auto before = outlook();
  ASSERT_EQ(expected.size(), 13u);
  EXPECT_NE(expected.back(), "two") << "those of a lower priority are behind it";
  for (std::size_t i = 0; i < 13; ++i) {
    const auto units = static_cast<std::int64_t>(i) + (expected[i] == "two" ? 2 : 1) +
                       (std::find(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(i), "two") !=
                        expected.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_NEAR(static_cast<double>(before.at(expected[i]).eta_ms - now / 1000), 2000.0 * static_cast<double>(units),
                100.0 * static_cast<double>(units))
        << i << " " << expected[i];
  }
  EXPECT_EQ(run_all(2'000'000), expected);
}

TEST_F(OutlookTest, jobs_that_have_waited_for_long_come_first) {
  observe();
  for (int i = 0; i < 6; ++i) submit("old" + std::to_string(i), spec(R"("priority":-1)"));
  now += 61'000'000;
  warm({"a"});
  for (int i = 0; i < 4; ++i) submit("new" + std::to_string(i), spec(R"("priority":2)"));
  const auto expected = by_position();
  EXPECT_EQ(expected.at(5), "old5");
  EXPECT_EQ(expected.at(9), "new3");
  EXPECT_EQ(run_all(1'000'000), expected);
}

TEST_F(OutlookTest, tenants_take_turns) {
  observe();
  for (int i = 0; i < 6; ++i) submit("a" + std::to_string(i), spec(R"("n":1)"), "a");
  for (int i = 0; i < 6; ++i) submit("b" + std::to_string(i), spec(R"("n":1)"), "b");
  const auto expected = by_position();
  ASSERT_EQ(expected.size(), 12u);
  const auto of_a = std::count_if(expected.begin(), expected.begin() + 6, [](const auto& id) { return id[0] == 'a'; });
  EXPECT_GE(of_a, 2);
  EXPECT_LE(of_a, 4);
  EXPECT_EQ(run_all(2'000'000), expected);
}

TEST_F(OutlookTest, a_running_job_has_no_position_and_ends_with_its_last_unit) {
  observe();
  submit("j", spec(R"("n":3)"));
  submit("k");
  store.start({"j", 0}, now);
  settle();
  now += 500'000;
  EXPECT_EQ(outlook().at("j").position, -1);
  EXPECT_NEAR(static_cast<double>(outlook().at("j").eta_ms - now / 1000), 5500, 300);
  EXPECT_EQ(outlook().at("k").position, 0);
  EXPECT_NEAR(static_cast<double>(outlook().at("k").eta_ms - now / 1000), 7500, 400);
  now += 60'000'000;  // it runs for longer than predicted
  EXPECT_GT(outlook().at("j").eta_ms, now / 1000);
}

TEST_F(OutlookTest, what_is_unknown_is_absent) {
  submit("j");
  submit("k");
  EXPECT_EQ(by_position(), (std::vector<std::string>{"j", "k"})) << "no worker is needed for an order";
  workers({"a"});
  settle();
  EXPECT_EQ(outlook().at("j").eta_ms, 0) << "no run was observed";
  for (const char* id : {"j", "k"}) run(id, 2'000'000);
  observe();
  EXPECT_TRUE(outlook().empty()) << "all have ended";
  submit("other", R"({"model":"other","prompt":"x","seed":1})");
  submit("j");
  EXPECT_EQ(outlook().at("other").position, 0) << "jobs of other models are not ahead of it";
  EXPECT_EQ(outlook().at("other").eta_ms, 0) << "no worker has the model";
  EXPECT_GT(outlook().at("j").eta_ms, 0);
  scheduler->on_workers({worker("a", "draining")}, now);
  EXPECT_EQ(outlook().at("j").eta_ms, 0) << "its worker returns it, and no other is ready";
}

TEST_F(OutlookTest, only_the_first_units_of_a_long_queue_are_looked_at) {
  observe();
  for (int i = 0; i < 3000; ++i) submit("j" + std::to_string(i), spec(R"("n":2)"), "t" + std::to_string(i % 7));
  const auto some = outlook(100);
  EXPECT_LE(some.size(), 102u);
  for (const auto& [id, one] : some) EXPECT_LT(one.position, 102) << id;
  EXPECT_GE(outlook(10'000).size(), 3000u);
}

}  // namespace
}  // namespace ditfleet::scheduling
