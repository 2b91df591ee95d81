// A worker that loses Redis for longer than its lease, or its lease; the test plays the scheduler.
#include <csignal>

#include "tests/system/redis_proxy.h"
#include "tests/system/worker_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;

class WorkerFencing : public WorkerTest {
 protected:
  WorkerFencing() : WorkerTest(short_lease()) {}
  static queue::QueueOptions short_lease() {
    auto options = quick();
    options.lease_ms = 600;
    return options;
  }
  // Also while Redis is only coming back.
  bool is_ready_again(const std::string& id) {
    return until([&] {
      auto record = wait(client_->job(id, "", soon()));
      return record.ok() && record->state == State::kReady;
    });
  }
  // From here on Redis keeps every call, for handed_back().
  void log_calls() {
    redis({"CONFIG", "SET", "slowlog-max-len", "100000"});
    redis({"CONFIG", "SET", "slowlog-log-slower-than", "0"});
  }
  // Whether a worker has called hand_back with this attempt's nonce.
  bool handed_back(const queue::Attempt& attempt) {
    for (const auto& entry : redis({"SLOWLOG", "GET", "100000"}).elements) {
      const auto& words = entry.elements.at(3).elements;
      if (words.size() < 2 || words[1].text.find("_hand_back") == std::string::npos) continue;
      for (const auto& word : words) {
        if (word.text == attempt.nonce) return true;
      }
    }
    return false;
  }
};

// The leader goes on reaping as soon as it can: it must leave the worker time to renew.
TEST_F(WorkerFencing, RedisAwayForSeveralLeasesCostsNothing) {
  script_->step_ms = 20;
  auto worker = start_ready_worker();
  auto slow = spec(1);
  slow.fields.set("num_inference_steps", 200);
  for (const bool killed : {true, false}) {
    script_->forget();
    const std::string id = ready(slow), next = ready(spec(2));
    assign(id, 0, worker->owner());
    assign(next, 0, worker->owner());
    ASSERT_TRUE(until([&] { return logged("step 1/2") && logged("text 2"); }));
    killed ? server_.kill() : static_cast<void>(::kill(server_.pid(), SIGSTOP));
    std::this_thread::sleep_for(4 * std::chrono::milliseconds(options_.lease_ms));
    EXPECT_FALSE(logged("stopped 1")) << "nobody has refused a renewal";
    killed ? server_.restart() : static_cast<void>(::kill(server_.pid(), SIGCONT));
    ASSERT_TRUE(until([&] {
      (void)wait(client_->reap(epoch_, 100, soon()));
      auto record = wait(client_->job(next, "", soon()));
      return record.ok() && record->state == State::kSucceeded;
    }));
    for (const auto& one : {id, next}) {
      EXPECT_EQ(job(one).unit_records.at(0).attempt, 1);
      EXPECT_EQ(job(one).unit_records.at(0).state, State::kSucceeded);
      EXPECT_EQ(event_types(one).find("ready:0 assigned:0 ready:0"), std::string::npos) << event_types(one);
    }
    EXPECT_FALSE(logged("stopped 1"));
  }
}

TEST_F(WorkerFencing, AUnitWithoutAnAnswerForTooLongIsHandedBack) {
  script_->step_ms = 20;
  auto options = service_options();
  options.timing.orphan = 900ms;
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  auto slow = spec(1);
  slow.fields.set("num_inference_steps", 1000);
  const std::string id = ready(slow);
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("step 1/2"); }));
  server_.kill();
  EXPECT_TRUE(until([&] { return logged("stopped 1"); }));
  server_.restart();
  // It is handed back, not completed and not a crash.
  ASSERT_TRUE(is_ready_again(id));
  EXPECT_EQ(keys_like("df:{0}:blob:*"), 0u);
}

// The lease is extended by more than its length while one step runs.
TEST_F(WorkerFencing, AStepLongerThanTheLeaseKeepsIt) {
  HeldEvent step(*script_, "step 1/2");
  auto worker = start_ready_worker();
  const std::string id = ready(spec(1));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return step.reached(); }));
  const auto lease_until = [&] {
    const auto leases = redis({"ZRANGE", "df:{0}:lease", "0", "-1", "WITHSCORES"}).elements;
    return leases.size() == 2 ? std::stod(leases[1].text) : 0;
  };
  const double first = lease_until();
  ASSERT_GT(first, 0);
  EXPECT_TRUE(until([&] { return reap() >= 0 && lease_until() > first + 2 * options_.lease_ms; }));
  step.release();
  ASSERT_TRUE(until([&] { return job(id).state == State::kSucceeded; }));
  EXPECT_EQ(job(id).unit_records.at(0).attempt, 1);
  EXPECT_FALSE(logged("stopped 1"));
}

// Twice in one unit, the worker is cut off for longer than its lease and the unit goes to another one. Each time the
// worker reports with its old nonce that it has not crashed, so the unit does not fail after queue.max_crashes.
TEST_F(WorkerFencing, AWorkerThatWasCutOffReportsBack) {
  script_->step_ms = 20;
  RedisProxy proxy(server_.endpoint().unix_path, server_.endpoint().unix_path + ".proxy");
  auto endpoint = server_.endpoint();
  endpoint.unix_path = proxy.path();
  log_calls();
  RunningWorker worker(endpoint, service_options(), script_, options_, adapters_);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  auto slow = spec(1);
  slow.fields.set("num_inference_steps", 1000);
  const std::string id = ready(slow);
  for (int round = 1; round <= 2; ++round) {
    script_->forget();
    const auto attempt = assign(id, 0, worker.owner());
    ASSERT_TRUE(until([&] { return logged("step 1/2"); }));
    proxy.pause();
    ASSERT_TRUE(until([&] { return reap() >= 0 && job(id).state == State::kReady; })) << "its lease lapses";
    EXPECT_FALSE(logged("stopped 1"));
    proxy.resume();
    ASSERT_TRUE(until([&] { return logged("stopped 1"); })) << "its renewal is refused";
    EXPECT_TRUE(until([&] { return handed_back(attempt); })) << "round " << round;
  }
}

// The queue takes a unit away while Redis is reachable: the renewal learns of it.
TEST_F(WorkerFencing, ALostUnitIsReportedBack) {
  script_->step_ms = 20;
  auto worker = start_ready_worker();
  log_calls();
  auto slow = spec(1);
  slow.fields.set("num_inference_steps", 1000);
  const std::string id = ready(slow);
  const auto attempt = assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("step 1/2"); }));
  ASSERT_TRUE(until([&] {
    redis({"ZADD", "df:{0}:lease", "XX", "1",
           id + ":0"});  // as if it had lapsed, until no renewal comes before the reaper
    return reap() >= 0 && job(id).state == State::kReady;
  }));
  EXPECT_TRUE(until([&] { return handed_back(attempt); }));
}

TEST_F(WorkerFencing, AUnitThatFinishesWithoutARedisIsStoredAndCompletedAfterwards) {
  auto worker = start_ready_worker();
  HeldEvent encoding(*script_);
  const std::string id = ready(spec(1));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return encoding.reached(); }));
  server_.kill();
  encoding.release();
  std::this_thread::sleep_for(2 * std::chrono::milliseconds(options_.lease_ms));
  server_.restart();
  ASSERT_TRUE(until([&] {
    auto record = wait(client_->job(id, "", soon()));
    return record.ok() && record->state == State::kSucceeded;
  }));
  EXPECT_EQ(job(id).unit_records.at(0).attempt, 1);
  EXPECT_EQ(picture_bytes(id), expected_bytes(1));
}

// The queue starts the unit, but the worker learns of it later.
TEST_F(WorkerFencing, AStartWhoseAnswerIsLostIsRepeated) {
  RedisProxy proxy(server_.endpoint().unix_path, server_.endpoint().unix_path + ".proxy");
  auto endpoint = server_.endpoint();
  endpoint.unix_path = proxy.path();
  RunningWorker worker(endpoint, service_options(), script_, options_, adapters_);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  const auto lose_answers_to = [&](const char* word) {
    proxy.pause();
    std::this_thread::sleep_for(20ms);
    proxy.lose_answers_to(word);
    proxy.resume();
  };
  lose_answers_to("_start");
  const std::string id = ready(spec(1));
  assign(id, 0, worker.owner());
  ASSERT_TRUE(reaches(id, State::kRunning));
  lose_answers_to("");
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  EXPECT_EQ(job(id).unit_records.at(0).attempt, 1);
  EXPECT_EQ(event_types(id).find("ready:0", event_types(id).find("started:0")), std::string::npos) << event_types(id);
}

// The queue completes the unit, but the worker never learns of it.
TEST_F(WorkerFencing, ACompletionWhoseAnswerIsLostKeepsItsResult) {
  RedisProxy proxy(server_.endpoint().unix_path, server_.endpoint().unix_path + ".proxy");
  auto endpoint = server_.endpoint();
  endpoint.unix_path = proxy.path();
  auto options = service_options();
  options.timing.orphan = 600ms;
  RunningWorker worker(endpoint, options, script_, options_, adapters_);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  HeldEvent encoding(*script_);
  const std::string id = ready(spec(1));
  assign(id, 0, worker.owner());
  ASSERT_TRUE(until([&] { return encoding.reached(); }));
  proxy.pause();
  std::this_thread::sleep_for(20ms);
  proxy.lose_answers_to("_complete");
  proxy.resume();
  encoding.release();
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  worker.drain();
  EXPECT_EQ(worker.join(), 0) << "it gives up, and has nothing left to do";
  EXPECT_EQ(picture_bytes(id), expected_bytes(1));
}

}  // namespace
}  // namespace ditfleet::testing
