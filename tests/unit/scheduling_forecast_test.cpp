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
