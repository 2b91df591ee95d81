// Redis (append-only, fsync always) is killed or stopped.
#include <boost/asio/detached.hpp>
#include <cstdlib>
#include <iostream>
#include <map>

#include "tests/fault/producers.h"
#include "tests/fault/service_fixture.h"

namespace ditfleet::testing {
namespace {

class RedisDeath : public ServiceTest {
 protected:
  // Starts all three kinds of producers, which run until collect().
  void produce(std::chrono::milliseconds pause) {
    http_ = std::make_unique<HttpProducer>(gateway_, pause);
    for (const auto route : {RedisProducer::Route::kFunction, RedisProducer::Route::kStream}) {
      auto& producer = *redis_producers_.emplace_back(std::make_unique<RedisProducer>(io_, connection_, route, pause));
      asio::co_spawn(io_, producer.run(), asio::detached);
    }
  }
  // Stops the producers and returns every acknowledged job.
  std::vector<std::string> collect() {
    for (auto& producer : redis_producers_) producer->stopping = true;
    EXPECT_TRUE(until([&] { return redis_producers_[0]->ended && redis_producers_[1]->ended; }, 30s));
    std::vector<std::string> ids = http_->stop();
    EXPECT_EQ(http_->complaint(), "");
    std::cout << "acknowledged: http " << ids.size();
    for (const auto& producer : redis_producers_) {
      std::cout << ", redis " << producer->ids.size() << " (" << producer->refused << " attempts failed)";
      EXPECT_GT(producer->ids.size(), 5u);
      ids.insert(ids.end(), producer->ids.begin(), producer->ids.end());
    }
    std::cout << " (http: " << http_->refused() << " attempts failed)\n";
    EXPECT_GT(ids.size(), 15u);
    return ids;
  }
  void kill_redis() {
    const pid_t pid = pid_of("redis");
    ASSERT_GT(pid, 1);
    ASSERT_EQ(::kill(pid, SIGKILL), 0);
    ASSERT_TRUE(until([&] { return pid_of("redis") > 1 && pid_of("redis") != pid; }, 60s)) << "Redis was not restarted";
    ASSERT_TRUE(until([&] { return connection_->connected(); }, 60s));
  }

  std::unique_ptr<HttpProducer> http_;
  std::vector<std::unique_ptr<RedisProducer>> redis_producers_;
};

TEST_F(RedisDeath, KilledThreeTimesUnderAllProducers) {
  start(2);
  if (HasFatalFailure()) return;
  produce(40ms);
  for (int round = 0; round < 3; ++round) {
    nap(1500ms);
    kill_redis();
    if (HasFatalFailure()) break;
  }
  nap(1s);
  const auto ids = collect();
  expect_all_ended_once(ids, 120s);
}

TEST_F(RedisDeath, KilledDuringALongUnit) {
  start(1);
  if (HasFatalFailure()) return;
  const auto id = submit(60, 1, 512);
  ASSERT_TRUE(until([&] { return !events(id, "step").empty(); }, 60s)) << history(id);
  kill_redis();
  if (HasFatalFailure()) return;
  expect_all_ended_once({id}, 120s);
  // The worker renewed its lease after the restart, so the unit was not assigned again.
  EXPECT_EQ(events(id, "started").size(), 1u) << history(id);
}

// For five leases, or DITFLEET_OUTAGE_S of them. No unit is started twice: neither those that ran nor those whose
// results could not be stored.
TEST_F(RedisDeath, Stopped) {
  const char* seconds = std::getenv("DITFLEET_OUTAGE_S");
  start(2, {"queue.lease_ms=1000", "queue.renew_ms=200"});
  if (HasFatalFailure()) return;
  const auto id = submit(200, 1, 384);
  ASSERT_TRUE(until([&] { return !events(id, "step").empty(); }, 60s)) << history(id);
  produce(100ms);
  nap(500ms);
  const pid_t pid = pid_of("redis");
  ASSERT_GT(pid, 1);
  ASSERT_EQ(::kill(pid, SIGSTOP), 0);
  nap(std::chrono::seconds(seconds ? std::atoi(seconds) : 5));
  ASSERT_EQ(::kill(pid, SIGCONT), 0);
  nap(1s);
  auto ids = collect();
  ids.push_back(id);
  expect_all_ended_once(ids, 120s);
  EXPECT_EQ(pid_of("redis"), pid);
  for (const auto& one : ids) {
    std::map<int, int> starts;
    for (const auto& event : events(one, "started")) EXPECT_EQ(++starts[event.unit], 1) << one << history(one);
  }
}

}  // namespace
}  // namespace ditfleet::testing
