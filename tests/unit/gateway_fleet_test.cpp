// The gateway's history of the fleet, and the routes that show it.
#include <chrono>
#include <cstdio>

#include "coordinator/gateway/events/fleet_history.h"
#include "shared/core/wall_clock.h"
#include "tests/unit/gateway_api_fixture.h"

namespace ditfleet::gateway {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Ends = std::array<std::uint32_t, FleetHistory::kEnds.size()>;

// Feeds a history with jobs of one unit.
struct Feeder {
  FleetHistory& history;
  std::string class_key = "demo/64x64x1/none/16/fp32";

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
          {{"tenant", tenant}, {"class", class_key}, {"units", "1"}, {"steps", "4"}, {"cost_us", "9"}});
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

TEST(FleetHistory, BlamesThePhaseThatExceedsItsMedianMost) {
  FleetHistory history;
  Feeder feed{history};
  for (int i = 0; i < 4; ++i) feed.run("j" + std::to_string(i), kNow + i, 100, 1000);
  const auto blames_of = [&](const std::string& id) -> std::vector<FleetHistory::Blame> {
    for (const auto& slow : history.slow("", "", 100, kNow + 10'000)) {
      if (slow.id == id) return history.blame(slow.class_key, queue::spans_of(slow, kNow), kNow + 10'000);
    }
    ADD_FAILURE() << id << " is not among the slow jobs";
    return {};
  };
  const auto blame_of = [&](const std::string& id) -> std::optional<FleetHistory::Blame> {
    const auto blames = blames_of(id);
    return blames.empty() ? std::nullopt : std::optional(blames.front());
  };
  EXPECT_FALSE(blame_of("j0"));  // too few units
  feed.run("waited", kNow, 1500, 1010);
  feed.run("ran", kNow, 110, 3000);
  const auto waited = blame_of("waited"), ran = blame_of("ran");
  ASSERT_TRUE(waited && ran);
  EXPECT_EQ(waited->phase, "queue");
  EXPECT_EQ(waited->us, 1'500'000);
  EXPECT_EQ(waited->median_us, 100'000);
  EXPECT_EQ(ran->phase, "denoise");
  EXPECT_EQ(ran->us - ran->median_us, 2'000'000);
  EXPECT_FALSE(blame_of("j0"));               // nothing exceeds its median
  EXPECT_EQ(blames_of("waited").size(), 1u);  // 10 ms more of denoising are not worth a word
  feed.run("both", kNow, 9000, 2000);
  const auto both = blames_of("both");
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0].phase, "queue");
  EXPECT_EQ(both[1].phase, "denoise");
  feed.submit("lost", kNow);
  feed.start("lost", kNow + 100, "w1");
  feed.event("lost", kNow + 5000, "ready", 0, {{"reason", "lease lapsed"}});
  feed.start("lost", kNow + 5000, "w2");
  feed.end("lost", kNow + 6000, "succeeded", 1'000'000);
  const auto lost = blame_of("lost");
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->phase, "tried before");
  const auto classes = history.classes(kNow + 10'000);
  ASSERT_EQ(classes.size(), 1u);
  EXPECT_EQ(classes[0].units, 8u);
  EXPECT_EQ(classes[0].phases[FleetHistory::kTotal]->at(0), 1'100'000);
  EXPECT_TRUE(history.classes(kNow + 2 * FleetHistory::kHourMs).empty());
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
            R"("back":"lease lapsed"},)"
            R"({"worker":"w3","reason":"cold","assigned_ms":7500,"started_ms":0,"ended_ms":8000,)"
            R"("back":"retry: out of memory"},)"
            R"({"worker":"w2","reason":"warm","assigned_ms":9000,"started_ms":9010,"ended_ms":9500,"back":null}])");
  EXPECT_EQ(json::serialize(shown.at("spans")),
            R"([{"name":"admission","begin_us":0,"us":10000},{"name":"queue","begin_us":10000,"us":990000},)"
            R"({"name":"tried before","begin_us":1000000,"us":7000000},)"
            R"({"name":"denoise","begin_us":8000000,"us":490000},{"name":"hand-over","begin_us":8490000,"us":10000}])");
  EXPECT_EQ(shown.at("predicted_us").as_int64(), 450'000);
  EXPECT_EQ(shown.at("actual_us").as_int64(), 490'000);
  EXPECT_TRUE(shown.at("blame").is_null());
  service.streams.clear();  // the events have expired
  const json::value left = body_of(send("GET", "/v1/jobs/" + id + "/timeline")).at("unit_records").at(0);
  EXPECT_EQ(left.at("attempts").as_array().size(), 1u);
  EXPECT_EQ(left.at("attempts").at(0).at("worker").as_string(), "w2");
  EXPECT_EQ(send("GET", "/v1/jobs/none/timeline").status, 404);
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
}

TEST_F(FleetRoutes, PagesNeedNoKeyAndHaveAPolicy) {
  start({{"acme", sha256_hex("a"), false}});
  for (const char* path : {"/", "/jobs/x", "/fleet", "/slow"}) {
    const Response page = send("GET", path);
    EXPECT_EQ(page.status, 200) << path;
    EXPECT_THAT(page.body, HasSubstr("/assets/page.js")) << path;
    EXPECT_THAT(header(page, "Content-Security-Policy"), HasSubstr("default-src 'none'")) << path;
  }
  EXPECT_EQ(send("GET", "/assets/page.css").content_type, "text/css");
  EXPECT_EQ(send("GET", "/assets/page.js").content_type, "text/javascript");
  EXPECT_EQ(send("GET", "/assets/other").status, 404);
  EXPECT_EQ(header(send("OPTIONS", "/v1/jobs/slow"), "Allow"), "GET, HEAD, OPTIONS");
  EXPECT_EQ(header(send("OPTIONS", "/v1/jobs/other"), "Allow"), "GET, HEAD, DELETE, OPTIONS");
}

}  // namespace
}  // namespace ditfleet::gateway
