// The forecast that the leader publishes: the backlog of each model, and when workers will be empty.
#include "tests/unit/scheduler_fixture.h"

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
  clips.frames_per_latent = 4;
  clips.apply("frames");
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

}  // namespace
}  // namespace ditfleet::scheduling
