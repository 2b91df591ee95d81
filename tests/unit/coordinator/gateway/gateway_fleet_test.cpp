// The gateway's history of the fleet, and the routes that show it.
#include <chrono>
#include <cstdio>

#include "coordinator/gateway/events/fleet_history.h"
#include "shared/core/wall_clock.h"
#include "tests/unit/coordinator/gateway/gateway_api_fixture.h"

namespace ditfleet::gateway {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Ends = std::array<std::uint32_t, FleetHistory::kEnds.size()>;

// Feeds a history with jobs of one unit.
struct Feeder {
  FleetHistory& history;
  std::string class_key = "demo/64x64x1/none/16/fp32";
  int steps = 4;
  std::int64_t cost_ms = 100;

  void event(const std::string& job, std::int64_t ms, const std::string& type, int unit,
             std::map<std::string, std::string> fields = {}) {
    history.apply({.id = std::to_string(ms) + "-0",
                   .job = job,
                   .type = type,
                   .unit = unit,
                   .at_ms = ms,
                   .fields = std::move(fields)});
  }
  void submit(const std::string& job, std::int64_t ms, const std::string& tenant = "acme") {
    event(job, ms, "queued", -1, {{"tenant", tenant}});
    event(job, ms, "ready", 0,
          {{"tenant", tenant},
           {"class", class_key},
           {"units", "1"},
           {"steps", std::to_string(steps)},
           {"cost_us", std::to_string(cost_ms * 1000)}});
  }
  void start(const std::string& job, std::int64_t ms, const std::string& worker) {
    event(job, ms, "assigned", 0, {{"worker", worker}});
    event(job, ms, "started", 0, {{"worker", worker}});
  }
  void end(const std::string& job, std::int64_t ms, const std::string& state, std::int64_t denoise_us = 0) {
    std::map<std::string, std::string> fields;
    if (denoise_us > 0) fields["phases_us"] = "{\"denoise\":" + std::to_string(denoise_us) + "}";
    event(job, ms, state, 0, fields);
    event(job, ms, state, -1);
  }
  // A job that waits `queue_ms` and then denoises for `run_ms`.
  void run(const std::string& job, std::int64_t ms, std::int64_t queue_ms, std::int64_t run_ms,
           const std::string& worker = "w1", const std::string& tenant = "acme") {
    submit(job, ms, tenant);
    start(job, ms + queue_ms, worker);
    end(job, ms + queue_ms + run_ms, "succeeded", run_ms * 1000);
  }
};

constexpr std::int64_t kNow = 1'700'000'000'000;

TEST(FleetHistory, CountsEndedJobsOfTheLastHour) {
  FleetHistory history;
  Feeder feed{history};
  feed.run("a", kNow, 10, 10);
  feed.submit("b", kNow);
  feed.end("b", kNow + 10'000, "canceled");
  feed.submit("c", kNow);
  feed.end("c", kNow + 10'000, "failed");
  auto counts = history.ended(kNow + 10'000);
  ASSERT_EQ(counts.size(), FleetHistory::kBuckets);
  EXPECT_EQ(counts[FleetHistory::kBuckets - 2], (Ends{1, 0, 0, 0, 0}));
  EXPECT_EQ(counts[FleetHistory::kBuckets - 1], (Ends{0, 1, 1, 0, 0}));
  counts = history.ended(kNow + 3'600'000);
  EXPECT_EQ(counts[0], (Ends{0, 1, 1, 0, 0}));
  for (const Ends& ends : history.ended(kNow + 7'200'000)) EXPECT_EQ(ends, Ends{});
  feed.run("d", kNow + 3'600'000, 0, 1);  // in the bucket of "a"
  EXPECT_EQ(history.ended(kNow + 3'600'000).back(), (Ends{1, 0, 0, 0, 0}));
}

TEST(FleetHistory, KeepsThePaceOfAClassAndTheProgressOfOpenJobs) {
  FleetHistory history;
  Feeder feed{history};
  EXPECT_EQ(history.pace(feed.class_key), nullptr);
  std::int64_t at = kNow;
  const auto run = [&](const std::string& id, std::int64_t run_ms, const std::string& phases) {
    feed.submit(id, at);
    feed.start(id, at + 10, "w1");
    at += 10 + run_ms;
    feed.event(id, at, "succeeded", 0, {{"phases_us", phases}});
    feed.event(id, at, "succeeded", -1);
  };
  run("old", 100, "{\"text\":5}");
  EXPECT_EQ(history.pace(feed.class_key), nullptr) << "no steps";
  run("a", 104, R"({"text":9,"wait":9,"denoise":4000,"vae":70000,"encode":20000})");
  ASSERT_NE(history.pace(feed.class_key), nullptr);
  EXPECT_DOUBLE_EQ(history.pace(feed.class_key)->step_us, 1000) << "of four steps";
  EXPECT_DOUBLE_EQ(history.pace(feed.class_key)->rest_us, 100'000) << "until the end of the unit";
  for (int i = 0; i < 20; ++i) run("b" + std::to_string(i), 58, R"({"denoise":8000,"vae":40000})");
  EXPECT_NEAR(history.pace(feed.class_key)->step_us, 2000, 20);
  EXPECT_NEAR(history.pace(feed.class_key)->rest_us, 50'000, 500);
  feed.submit("open", kNow);
  EXPECT_EQ(history.rising("open", 0.3), 0.3);
  EXPECT_EQ(history.rising("open", 0.1), 0.3) << "it was tried again";
  EXPECT_EQ(history.rising("open", 0.4), 0.4);
  feed.end("open", kNow + 10, "failed");
  EXPECT_EQ(history.rising("open", 0.1), 0.1) << "it was forgotten";
}

// "phase excess than" of each blame, in milliseconds; then the speed of the worker if it is slow.
std::string text_of(const FleetHistory::Verdict& verdict) {
  std::string out;
  for (const auto& blame : verdict.over)
    out += blame.phase + " +" + std::to_string((blame.us - blame.expected_us) / 1000) + " " + blame.than + "; ";
  return verdict.speed ? out + "worker slow" : out;
}

class Verdicts : public ::testing::Test {
 protected:
  std::string of(const std::string& id, std::int64_t now_ms = kNow + 60'000) {
    for (const auto& slow : history.slow("", "", 200, now_ms)) {
      if (slow.id == id) return text_of(history.verdict(slow, now_ms));
    }
    ADD_FAILURE() << id << " is not among the slow jobs";
    return {};
  }

  FleetHistory history;
  Feeder feed{history};
};

TEST_F(Verdicts, BlameThePhaseThatExceedsItsMedianMost) {
  feed.cost_ms = 1000;
  for (int i = 0; i < 5; ++i) feed.run("j" + std::to_string(i), kNow + i, 100, 1000);
  EXPECT_EQ(of("j0"), "");
  feed.run("waited", kNow, 1500, 1010);
  feed.run("ran", kNow, 110, 3000);
  EXPECT_EQ(of("waited"), "queue +1400 the median of its class; ");
  EXPECT_EQ(of("ran"), "denoise +2000 the median of its class for 4 steps; ");
  feed.run("both", kNow, 5000, 4000);
  EXPECT_EQ(of("both"), "queue +4900 the median of its class; denoise +3000 the median of its class for 4 steps; ");
  feed.submit("lost", kNow);
  feed.start("lost", kNow + 100, "w1");
  feed.event("lost", kNow + 4000, "ready", 0, {{"reason", "lease lapsed"}});
  feed.start("lost", kNow + 7000, "w2");
  feed.end("lost", kNow + 8000, "succeeded", 1'000'000);
  EXPECT_EQ(of("lost"), "earlier attempts +3900 the median of its class; queued again +3000 the median of its class; ");
  const auto classes = history.classes(kNow + 10'000);
  ASSERT_EQ(classes.size(), 1u);
  EXPECT_EQ(classes[0].units, 9u);
  EXPECT_EQ(classes[0].phases[FleetHistory::kTotal]->at(0), 1'100'000);
  EXPECT_TRUE(history.classes(kNow + 2 * FleetHistory::kHourMs).empty());
}

TEST_F(Verdicts, IgnoreNoise) {
  for (int i = 0; i < 5; ++i) feed.run("j" + std::to_string(i), kNow + i, 10, 100);
  feed.run("little", kNow, 10, 149);
  feed.run("enough", kNow, 10, 151);
  feed.run("part", kNow, 2000, 151);
  EXPECT_EQ(of("little"), "");
  EXPECT_EQ(of("enough"), "denoise +51 the median of its class for 4 steps; ");
  EXPECT_EQ(of("part"), "queue +1990 the median of its class; ");
}

TEST_F(Verdicts, ManyStepsAreNoFault) {
  for (int i = 0; i < 8; ++i) feed.run("j" + std::to_string(i), kNow + i, 10, 400);
  feed.steps = 40;
  feed.run("forty", kNow, 10, 4000);
  feed.run("slow", kNow, 10, 8000);
  feed.steps = 4;
  feed.run("four", kNow, 10, 4000);
  EXPECT_EQ(of("forty"), "");
  EXPECT_EQ(of("slow"), "denoise +4000 the median of its class for 40 steps; ");
  EXPECT_EQ(of("four"), "denoise +3600 the median of its class for 4 steps; ");
  EXPECT_EQ(history.classes(kNow + 10'000).at(0).phases[7]->at(1), 200'000) << "denoising is shown per step";
}

TEST_F(Verdicts, WithoutEnoughUnitsCompareWithThePrediction) {
  feed.cost_ms = 142;
  feed.run("first", kNow, 0, 3600);
  EXPECT_EQ(of("first"), "run +3458 predicted; ");
  feed.cost_ms = 3500;
  feed.run("second", kNow, 0, 3600);
  EXPECT_EQ(of("second"), "");
  feed.run("waited", kNow, 9000, 3600);
  EXPECT_EQ(of("waited"), "queue +9000 in an idle fleet; ");
  feed.submit("broken", kNow);
  feed.start("broken", kNow + 10, "w2");
  feed.end("broken", kNow + 20'000, "failed");
  EXPECT_EQ(of("broken"), "run +16490 predicted; ");
}

TEST_F(Verdicts, DoNotChangeAfterTheEnd) {
  for (int i = 0; i < 6; ++i) feed.run("j" + std::to_string(i), kNow + i, 10, 1000);
  feed.run("slow", kNow + 10, 10, 3000);
  const std::string before = of("slow");
  EXPECT_EQ(before, "denoise +2000 the median of its class for 4 steps; ");
  // A unit whose end this history did not see.
  const queue::JobSummary other{.id = "other",
                                .unit = 0,
                                .class_key = feed.class_key,
                                .worker = "w1",
                                .state = job::State::kSucceeded,
                                .steps = 4,
                                .created_ms = kNow,
                                .ready_ms = kNow,
                                .first_assigned_ms = kNow,
                                .assigned_ms = kNow,
                                .started_ms = kNow,
                                .ended_ms = kNow + 5000,
                                .phases_us = {{"denoise", 5'000'000}}};
  EXPECT_EQ(text_of(history.verdict(other, kNow + 5000)), "denoise +4000 the median of its class for 4 steps; ");
  for (int i = 0; i < 30; ++i) feed.run("k" + std::to_string(i), kNow + 10'000 + i, 10, 3000);
  EXPECT_EQ(of("slow"), before);
  EXPECT_EQ(text_of(history.verdict(other, kNow + 60'000)), "denoise +4000 the median of its class for 4 steps; ");
  EXPECT_EQ(history.classes(kNow + 60'000).at(0).phases[7]->at(0), 750'000) << "the median has moved";
}

TEST_F(Verdicts, NameASlowWorker) {
  const auto speed = [&](const std::string& worker, std::int64_t now_ms) {
    return history.speed_of(worker, now_ms).value_or(-1);
  };
  std::int64_t now = kNow;
  for (int i = 0; i < 6; ++i) feed.run("a" + std::to_string(i), now += 2000, 10, 100, "w1");
  EXPECT_EQ(speed("w1", now + 2000), -1) << "there is no other worker";
  for (int i = 0; i < 3; ++i) feed.run("b" + std::to_string(i), now += 2000, 10, 800, "w2");
  EXPECT_EQ(speed("w2", now + 2000), -1) << "three runs are too few";
  const std::string denoise = "denoise +700 the median of its class for 4 steps; ";
  EXPECT_EQ(of("b0", now + 4000), denoise);
  feed.run("b3", now += 2000, 10, 800, "w2");
  EXPECT_NEAR(speed("w1", now + 2000), 1, 1e-9);
  EXPECT_NEAR(speed("w2", now + 2000), 0.125, 1e-9);
  EXPECT_EQ(of("b0", now + 2000), denoise + "worker slow") << "one of the runs that show it";
  EXPECT_EQ(of("a0", now + 4000), "");
}

TEST_F(Verdicts, DoNotAccuseWorkersThatAreAllSlow) {
  std::int64_t now = kNow;
  for (int run = 0; run < 60; ++run) {
    for (const char* worker : {"w1", "w2", "w3"})
      feed.run(worker + std::to_string(run), now += 2000, 10, run < 8 ? 100 : 800, worker);
    for (const auto& [worker, speed] : history.speeds(now + 1900)) EXPECT_GT(speed.ratio, 0.5) << worker << " " << run;
  }
  EXPECT_EQ(history.speeds(now + 3000).size(), 3u);
  feed.run("cold", now += 10'000, 10, 20'000, "w1");  // it compiles
  EXPECT_GT(history.speed_of("w1", now + 30'000).value(), 0.5);
}

TEST(FleetHistory, ListsTheSlowestJobsOfTheHour) {
  FleetHistory history;
  Feeder feed{history};
  for (int i = 1; i <= 100; ++i) feed.run("j" + std::to_string(i), kNow, i, 1, "w1", i % 2 == 0 ? "acme" : "bolt");
  feed.class_key = "demo/32x32x1/none/16/fp32";
  feed.run("other", kNow, 50, 0);
  auto slow = history.slow("", "", 3, kNow + 200);
  ASSERT_EQ(slow.size(), 3u);
  EXPECT_EQ(slow[0].id, "j100");
  EXPECT_EQ(slow[0].ended_ms - slow[0].created_ms, 101);
  EXPECT_EQ(history.slow("bolt", "", 3, kNow + 200)[0].id, "j99");
  EXPECT_EQ(history.slow("", "demo/32x32x1/none/16/fp32", 3, kNow + 200).size(), 1u);
  EXPECT_EQ(history.slow("", "", 1000, kNow + 200).size(), FleetHistory::kMostSlow + 1);  // bounded
  EXPECT_EQ(history.slow("", "", 1000, kNow + 200, 130).size(), 32u) << "from j69 on";
  EXPECT_TRUE(history.slow("", "", 3, kNow + FleetHistory::kHourMs + 200).empty());
}

TEST(FleetHistory, KeepsRunsOfWorkers) {
  FleetHistory history;
  Feeder feed{history};
  feed.run("a", kNow, 10, 100);
  feed.submit("b", kNow + 200);
  feed.start("b", kNow + 300, "w1");
  feed.event("b", kNow + 400, "ready", 0, {{"reason", "retry"}, {"not_before_ms", "1"}});
  feed.event("b", kNow + 500, "ready", 0, {{"reason", "retry is due"}});
  feed.start("b", kNow + 600, "w2");
  const auto& runs = history.runs(kNow + 700);
  ASSERT_EQ(runs.size(), 2u);
  ASSERT_EQ(runs.at("w1").size(), 2u);
  EXPECT_EQ(runs.at("w1")[0].end, "succeeded");
  EXPECT_EQ(runs.at("w1")[0].to_ms, kNow + 110);
  EXPECT_EQ(runs.at("w1")[1].end, "returned");
  EXPECT_EQ(runs.at("w1")[1].to_ms, kNow + 400);
  EXPECT_EQ(runs.at("w2")[0].to_ms, 0);
  history.restore({}, kNow + 800);  // the end of "b" was missed
  EXPECT_EQ(history.runs(kNow + 900).at("w2")[0].end, "unknown");
  EXPECT_TRUE(history.queue_now().empty());
  for (int i = 0; i < 100; ++i) feed.run("c" + std::to_string(i), kNow + 1000 + i, 1, 1);
  EXPECT_EQ(history.runs(kNow + 2000).at("w1").size(), FleetHistory::kMostRuns);
  EXPECT_TRUE(history.runs(kNow + 2 * FleetHistory::kHourMs).empty());
}

TEST(FleetHistory, ManyClassesAndWorkersStayBounded) {
  FleetHistory history;
  Feeder feed{history};
  for (int i = 0; i < 2000; ++i) {
    feed.class_key = "demo/" + std::to_string(8 * i) + "x64x1/none/16/fp32";
    feed.run("j" + std::to_string(i), kNow + i, 1, 1, "w" + std::to_string(i));
  }
  EXPECT_EQ(history.classes(kNow + 3000).size(), FleetHistory::kMostClasses);
  const auto& runs = history.runs(kNow + 3000);
  EXPECT_EQ(runs.size(), FleetHistory::kMostWorkers);
  EXPECT_TRUE(runs.contains("w1999"));  // the latest are kept
  EXPECT_FALSE(runs.contains("w0"));
}

TEST(FleetHistory, TenThousandJobsOnTwoHundredWorkers) {
  FleetHistory history;
  Feeder feed{history};
  const auto begun = std::chrono::steady_clock::now();
  for (int i = 0; i < 10'000; ++i) {
    feed.class_key = i % 3 == 0 ? "demo/64x64x1/none/16/fp32" : "demo/128x128x1/none/16/fp32";
    feed.run("job-" + std::to_string(i), kNow + 300 * i, 100 + i % 50, 5000 + i % 997,
             "worker-" + std::to_string(i % 200), "tenant-" + std::to_string(i % 7));
  }
  for (int i = 0; i < 10'000; ++i) feed.submit("open-" + std::to_string(i), kNow + 3'000'000);
  const std::int64_t now = kNow + 3'010'000;
  const auto fed = std::chrono::steady_clock::now();
  EXPECT_EQ(history.queue_now().size(), 1u);
  EXPECT_EQ(history.queue_now()[0].ready, 10'000);
  EXPECT_EQ(history.classes(now).size(), 2u);
  EXPECT_EQ(history.runs(now).size(), 200u);
  EXPECT_EQ(history.slow("", "", 50, now).size(), 50u);
  const auto read = std::chrono::steady_clock::now();
  const auto ms = [](auto time) { return std::chrono::duration<double, std::milli>(time).count(); };
  std::printf("60,000 events in %.0f ms, an answer in %.1f ms\n", ms(fed - begun), ms(read - fed));
}

class FleetRoutes : public GatewayApi {
 protected:
  Feeder feed{hub->history()};
};

TEST_F(FleetRoutes, TheTimelineOfAJobThatWasTriedBefore) {
  const std::string id(body_of(send("POST", "/v1/jobs", R"({"prompt":"a"})")).at("id").as_string());
  queue::JobRecord& record = service.jobs[id];
  service.admit(id);
  record.state = record.unit_records[0].state = job::State::kSucceeded;
  record.created_ms = 1000;
  record.ready_ms = 1010;
  record.ended_ms = 9500;
  record.cost_us = 450'000;
  queue::UnitRecord& unit = record.unit_records[0];
  unit.owner = "w2:run";
  unit.assigned_ms = 9000;
  unit.started_ms = 9010;
  unit.ended_ms = 9500;
  unit.phases_us = {{"denoise", 490'000}};
  service.streams[id].clear();
  const auto event = [&](const std::string& type, std::int64_t ms, std::map<std::string, std::string> fields) {
    service.event(id, type, 0, std::move(fields));
    service.streams[id].back().at_ms = ms;
  };
  event("ready", 1010, {});
  event("assigned", 2000, {{"worker", "w1"}, {"reason", "warm"}});
  event("started", 2010, {});
  event("step", 3000, {{"step", "7"}, {"total", "60"}});
  event("ready", 7000, {{"reason", "lease lapsed"}, {"owner", "w1:x"}});
  event("assigned", 7500, {{"worker", "w3"}, {"reason", "cold"}});
  event("ready", 8000, {{"reason", "retry"}, {"not_before_ms", "8500"}, {"message", "out of memory"}});
  event("ready", 8500, {{"reason", "retry is due"}});
  event("assigned", 9000, {{"worker", "w2"}, {"reason", "warm"}});
  event("started", 9010, {});
  event("succeeded", 9500, {});
  const json::value shown = body_of(send("GET", "/v1/jobs/" + id + "/timeline")).at("unit_records").at(0);
  EXPECT_EQ(json::serialize(shown.at("attempts")),
            R"([{"worker":"w1","reason":"warm","assigned_ms":2000,"started_ms":2010,"ended_ms":7000,)"
            R"("step":7,"total_steps":60,"back":"lease lapsed"},)"
            R"({"worker":"w3","reason":"cold","assigned_ms":7500,"started_ms":0,"ended_ms":8000,)"
            R"("step":0,"total_steps":0,"back":"retry: out of memory"},)"
            R"({"worker":"w2","reason":"warm","assigned_ms":9000,"started_ms":9010,"ended_ms":9500,)"
            R"("step":0,"total_steps":0,"back":null}])");
  EXPECT_EQ(json::serialize(shown.at("spans")),
            R"([{"name":"admission","begin_us":0,"us":10000},{"name":"queue","begin_us":10000,"us":990000},)"
            R"({"name":"earlier attempts","begin_us":1000000,"us":5500000},)"
            R"({"name":"queued again","begin_us":6500000,"us":1500000},)"
            R"({"name":"denoise","begin_us":8000000,"us":490000},{"name":"hand-over","begin_us":8490000,"us":10000}])");
  EXPECT_EQ(shown.at("predicted_us").as_int64(), 450'000);
  EXPECT_EQ(shown.at("actual_us").as_int64(), 490'000);
  EXPECT_EQ(json::serialize(shown.at("blame")),
            R"({"phase":"earlier attempts","us":5500000,"expected_us":0,"over_us":5500000,)"
            R"("than":"in an idle fleet","worker":null})");
  EXPECT_TRUE(shown.at("holder").is_null());
  service.streams.clear();  // the events have expired
  const json::value left = body_of(send("GET", "/v1/jobs/" + id + "/timeline")).at("unit_records").at(0);
  EXPECT_EQ(left.at("attempts").as_array().size(), 1u);
  EXPECT_EQ(left.at("attempts").at(0).at("worker").as_string(), "w2");
  EXPECT_EQ(send("GET", "/v1/jobs/none/timeline").status, 404);
}

TEST_F(FleetRoutes, TheTimelineShowsTheWorkerOfAnOpenUnit) {
  const std::string id(body_of(send("POST", "/v1/jobs", R"({"prompt":"a"})")).at("id").as_string());
  service.admit(id);
  service.step(id, 0, 12, 60);
  queue::UnitRecord& unit = service.jobs[id].unit_records[0];
  unit.owner = "w1:run";
  unit.assigned_ms = unit.started_ms = 1'700'000'000'000 - 500;
  const auto holder = [&] {
    const json::value timeline = body_of(send("GET", "/v1/jobs/" + id + "/timeline"));
    return json::serialize(timeline.at("unit_records").at(0).at("holder"));
  };
  EXPECT_EQ(holder(), R"({"worker":"w1","state":"gone","others":false})");
  queue::WorkerInfo info{.name = "w1", .boot = "run", .state = "draining"};
  info.heartbeat_ms = 1'700'000'000'700;
  info.unheard_ms = 300;
  service.worker_infos = {info};
  EXPECT_EQ(holder(), R"({"worker":"w1","state":"draining","others":false,"unheard_ms":300,"event_ago_ms":1000})");
  service.worker_infos[0].unheard_ms = 4000;
  info.name = "w2";
  info.state = "ready";
  service.worker_infos.push_back(info);
  EXPECT_EQ(holder(),
            R"({"worker":"w1","state":"silent","others":true,"unheard_ms":4000,"event_ago_ms":4700,"lease_ms":1000})");
  service.fleet_forecast = queue::FleetForecast();
  const json::value workers = body_of(send("GET", "/v1/workers")).at("workers");
  EXPECT_TRUE(workers.at(0).at("empty_in_ms").is_null()) << "a silent worker may never be empty";
  EXPECT_EQ(workers.at(1).at("empty_in_ms").as_int64(), 0);
}

TEST_F(FleetRoutes, ASlowWorkerIsNamed) {
  const std::int64_t now = unix_ms() - 100'000;
  service.worker_infos = {{.name = "w1", .boot = "r"}, {.name = "w2", .boot = "r"}, {.name = "w3", .boot = "r"}};
  for (int i = 0; i < 6; ++i) {
    feed.run("a" + std::to_string(i), now + 2000 * i, 10, 100, "w1");
    feed.run("b" + std::to_string(i), now + 2000 * i, 10, 800, "w2");
  }
  const json::value workers = body_of(send("GET", "/v1/workers")).at("workers");
  EXPECT_NEAR(workers.at(0).at("speed").to_number<double>(), 1, 1e-9);
  EXPECT_NEAR(workers.at(1).at("speed").to_number<double>(), 0.125, 1e-9);
  EXPECT_TRUE(workers.at(2).at("speed").is_null()) << "unknown";
  EXPECT_THAT(send("GET", "/metrics").body, ::testing::ContainsRegex("speed_ratio\\{worker=\"(w2|other)\"\\} 0.125"));
  EXPECT_NEAR(body_of(send("GET", "/v1/fleet")).at("workers").at(1).at("speed").to_number<double>(), 0.125, 1e-9);
  const json::value slowest = body_of(send("GET", "/v1/jobs/slow?limit=1")).at("jobs").at(0);
  EXPECT_NEAR(slowest.at("worker_speed").to_number<double>(), 0.125, 1e-9);
  EXPECT_EQ(slowest.at("blame").at("worker").as_string(), "w2");
}

TEST_F(FleetRoutes, TenantsSeeTheirOwnJobsOnly) {
  start({{"acme", sha256_hex("a"), false}, {"bolt", sha256_hex("b"), false}, {"ops", sha256_hex("o"), true}});
  Feeder fleet{hub->history()};
  const std::int64_t now = unix_ms();
  fleet.run("old-of-acme", now - 2000, 10, 100, "w1", "acme");
  fleet.submit("new-of-acme", now - 1000, "acme");
  fleet.start("new-of-acme", now - 900, "w1");
  fleet.submit("new-of-bolt", now - 1000, "bolt");
  const auto as = [&](const char* key, const std::string& path) {
    return send("GET", path, {}, {{"Authorization", "Bearer " + std::string(key)}});
  };
  EXPECT_EQ(send("GET", "/v1/fleet").status, 401);
  const Response bolt = as("b", "/v1/fleet");
  EXPECT_THAT(bolt.body, Not(HasSubstr("acme")));
  const json::value seen = body_of(bolt);
  ASSERT_EQ(seen.at("queue").as_array().size(), 1u);
  EXPECT_EQ(seen.at("queue").at(0).at("ready").as_int64(), 1);
  ASSERT_EQ(seen.at("workers").at(0).at("runs").as_array().size(), 2u);
  EXPECT_TRUE(seen.at("workers").at(0).at("runs").at(0).at(0).is_null());
  EXPECT_EQ(body_of(as("b", "/v1/jobs/slow")).at("jobs").as_array().size(), 0u);
  EXPECT_EQ(body_of(as("a", "/v1/jobs/slow")).at("jobs").at(0).at("id").as_string(), "old-of-acme");
  const json::value all = body_of(as("o", "/v1/fleet"));
  EXPECT_EQ(all.at("queue").as_array().size(), 2u);
  EXPECT_EQ(all.at("workers").at(0).at("state").as_string(), "gone");  // it has no heartbeat
  EXPECT_EQ(all.at("workers").at(0).at("runs").at(0).at(0).as_string(), "old-of-acme");
  EXPECT_EQ(as("o", "/v1/jobs/slow?limit=0").status, 400);
  EXPECT_EQ(as("o", "/v1/jobs/slow?state=x").status, 400);
  EXPECT_EQ(as("o", "/v1/jobs/slow?minutes=61").status, 400);
}

TEST_F(FleetRoutes, PagesNeedNoKeyAndHaveAPolicy) {
  start({{"acme", sha256_hex("a"), false}});
  for (const char* path : {"/", "/jobs/x", "/fleet", "/slow", "/alerts", "/docs"}) {
    const Response page = send("GET", path);
    EXPECT_EQ(page.status, 200) << path;
    EXPECT_THAT(page.body, HasSubstr("/assets/page.js")) << path;
    EXPECT_THAT(header(page, "Content-Security-Policy"), HasSubstr("default-src 'none'")) << path;
  }
  EXPECT_EQ(send("GET", "/assets/page.css").content_type, "text/css");
  EXPECT_EQ(send("GET", "/assets/page.js").content_type, "text/javascript");
  EXPECT_THAT(send("GET", "/assets/alerts.md").body, HasSubstr("## No leader"));
  EXPECT_EQ(send("GET", "/assets/other").status, 404);
  EXPECT_EQ(header(send("OPTIONS", "/v1/jobs/slow"), "Allow"), "GET, HEAD, OPTIONS");
  EXPECT_EQ(header(send("OPTIONS", "/v1/jobs/other"), "Allow"), "GET, HEAD, DELETE, OPTIONS");
}

}  // namespace
}  // namespace ditfleet::gateway
