// Leases that lapse: what counts against a unit, what is forgiven, and what its dead letter says.
#include <gmock/gmock.h>

#include <csignal>
#include <thread>

#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;
using queue::RenewOutcome;
using ::testing::HasSubstr;

class QueueLapse : public QueueTest {
 protected:
  void SetUp() override {
    lead();
    reap();  // the first call starts the grace of this Redis
  }
  // Ends the lease of a held unit.
  void lapse(const queue::UnitRef& ref) {
    redis({"ZADD", keys_.lease(), "XX", "1", member(ref)});
    EXPECT_GE(reap(), 1);
  }
  static std::string member(const queue::UnitRef& ref) { return ref.job + ":" + std::to_string(ref.unit); }
  queue::Attempt run_on(const std::string& owner, const queue::UnitRef& ref) {
    const auto attempt = assign(ref.job, ref.unit, owner);
    EXPECT_TRUE(start(attempt).ok());
    return attempt;
  }
  void hand_back(const queue::Attempt& attempt) {
    EXPECT_TRUE(wait(client_->hand_back(std::span(&attempt, 1), soon())).ok());
  }
  Result<void> fail(const queue::Attempt& attempt, bool crash = false) {
    queue::Failure failure{.attempt = attempt, .error = {Code::kOutOfMemory, "[test] no memory"}};
    failure.retryable = !crash;
    failure.crash = crash;
    return wait(client_->fail(failure, soon()));
  }
  // Makes a delayed unit ready.
  void retry(const queue::UnitRef& ref) {
    redis({"ZADD", keys_.delayed(), "XX", "1", member(ref)});
    EXPECT_GE(reap(), 1);
  }
  // The fields of the latest event.
  std::map<std::string, std::string> latest(const std::string& id) {
    auto events = wait(client_->events(id, "0", 10'000, soon()));
    return events && !events->empty() ? events->back().fields : std::map<std::string, std::string>();
  }
  std::map<std::string, std::string> dead_letter() {
    const auto dead = redis({"XRANGE", keys_.dead(), "-", "+"});
    EXPECT_EQ(dead.elements.size(), 1u);
    std::map<std::string, std::string> fields;
    if (dead.elements.empty()) return fields;
    const auto& flat = dead.elements[0].elements[1].elements;
    for (std::size_t i = 0; i + 1 < flat.size(); i += 2) fields[flat[i].text] = flat[i + 1].text;
    return fields;
  }
};

// Workers lose Redis when this process does, and need time to connect again.
TEST_F(QueueLapse, LeasesAreHeldAfterAReconnect) {
  const auto attempt = running();
  const auto other = connect();
  const auto generation = connection_->generation();
  ASSERT_TRUE(wait(other->execute(redis::Command("CLIENT") << "KILL"
                                                           << "TYPE"
                                                           << "normal",
                                  soon()))
                  .ok());
  while (connection_->generation() == generation) io_.run_one();
  redis({"ZADD", keys_.lease(), "XX", "1", member(attempt.ref)});
  EXPECT_EQ(reap(), 0);
  EXPECT_EQ(renew(attempt), RenewOutcome::kOk);
  other->stop();
}

// No connection is lost, and Redis answers the leader before the worker's renewal arrives.
TEST_F(QueueLapse, LeasesAreHeldAfterRedisWasSilent) {
  options_.lease_ms = 500;
  client_ = std::make_unique<queue::Client>(connection_, options_);
  const auto attempt = running();
  ASSERT_EQ(::kill(server_.pid(), SIGSTOP), 0);
  std::thread later([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1000));
    ::kill(server_.pid(), SIGCONT);
  });
  EXPECT_EQ(reap(), 0);
  later.join();
  EXPECT_EQ(reap(), 0);
  EXPECT_EQ(renew(attempt), RenewOutcome::kOk);
}

// The worker renews after the leader has read which leases are due.
TEST_F(QueueLapse, AUnitWhoseLeaseWasRenewedIsKept) {
  const auto attempt = running();
  std::vector<std::string> call = {"FCALL", "ditfleet_v3_reap", "14"};
  for (const std::string& key : {keys_.leader(), keys_.boot(), keys_.lease(), keys_.delayed(), keys_.ready(),
                                 keys_.deadline(), keys_.dead(), keys_.in(), keys_.units(), keys_.open(), keys_.specs(),
                                 keys_.last(), keys_.events(), keys_.job(attempt.ref.job)})
    call.push_back(key);
  for (const std::string& argument : {std::to_string(epoch_), std::string("5000"), std::string("2"), std::string("5"),
                                      std::string("0"), std::string("lease"), attempt.ref.job, std::string("0")})
    call.push_back(argument);
  EXPECT_EQ(redis(call).integer, 0);
  EXPECT_EQ(job(attempt.ref.job).state, State::kRunning);
  EXPECT_EQ(renew(attempt), RenewOutcome::kOk);
}

TEST_F(QueueLapse, UnitsLostBeforeTheyStartAreDeadLetteredAfterFiveLapses) {
  const std::string id = submit();
  admit_all();
  for (int lapses = 1; lapses <= 5; ++lapses) {
    ASSERT_EQ(job(id).state, State::kReady) << lapses;
    assign(id, 0, "w" + std::to_string(lapses) + ":boot");
    lapse({id, 0});
    if (lapses < 5) {
      EXPECT_EQ(latest(id)["lapses"], std::to_string(lapses));
    }
  }
  const auto record = job(id);
  ASSERT_EQ(record.state, State::kFailed) << event_types(id);
  EXPECT_EQ(record.error->message,
            "[queue] 5 workers were lost while they held this unit, 0 of them by a crash after it had started "
            "(queue.max_lapses is 5, queue.max_crashes is 2); the last was w5:boot");
  auto dead = dead_letter();
  EXPECT_EQ(dead["lapses"], "5");
  EXPECT_EQ(dead["crashes"], "0");
  EXPECT_EQ(dead["owner"], "w5:boot");
  EXPECT_EQ(redis({"ZCARD", keys_.lease()}).integer + redis({"ZCARD", keys_.ready()}).integer, 0);
}

TEST_F(QueueLapse, TwoCrashesAfterTheStartAreTheEndAndTheLetterNamesTheUnitsBeside) {
  const auto poison = running();
  const std::string id = submit();
  admit_all();
  const auto beside = assign(id);
  lapse(poison.ref);
  EXPECT_EQ(latest(poison.ref.job).count("beside"), 0u) << "other tenants' jobs";
  run_on("w1:boot", poison.ref);
  lapse(poison.ref);
  ASSERT_EQ(job(poison.ref.job).state, State::kFailed);
  EXPECT_THAT(job(poison.ref.job).error->message, HasSubstr("2 workers were lost"));
  auto dead = dead_letter();
  EXPECT_EQ(dead["crashes"], "2");
  EXPECT_EQ(dead["beside"], member(beside.ref));
}

TEST_F(QueueLapse, AWorkerThatReportsBackTakesItsCrashBack) {
  const auto first = running();
  const auto ref = first.ref;
  lapse(ref);
  EXPECT_EQ(latest(ref.job)["crashes"], "1");
  hand_back(first);
  hand_back(first);  // once only
  EXPECT_EQ(event_types(ref.job), "queued ready:0 assigned:0 started:0 ready:0");

  const auto second = run_on("w1:boot", ref);
  lapse(ref);
  EXPECT_EQ(latest(ref.job)["crashes"], "1");
  EXPECT_EQ(renew(second), RenewOutcome::kLost);

  const auto third = run_on("w2:boot", ref);
  lapse(ref);
  EXPECT_EQ(latest(ref.job)["crashes"], "1");
  const auto fourth = run_on("w3:boot", ref);  // the report comes while another worker runs the unit
  EXPECT_FALSE(complete(third).ok());
  lapse(ref);
  EXPECT_EQ(latest(ref.job)["crashes"], "1");
  EXPECT_EQ(latest(ref.job)["lapses"], "4");
  EXPECT_FALSE(fail(fourth).ok());

  run_on("w4:boot", ref);
  lapse(ref);
  EXPECT_EQ(job(ref.job).state, State::kFailed) << "five lapses in all";
}

TEST_F(QueueLapse, OnlyTheAttemptThatCompletedAUnitMayRepeatTheCall) {
  const auto first = running();
  lapse(first.ref);
  const auto second = run_on("w1:boot", first.ref);
  ASSERT_TRUE(complete(second, R"({"key":"second"})").ok());
  EXPECT_EQ(complete(first, R"({"key":"first"})").error().code, Code::kConflict);
  EXPECT_TRUE(complete(second, R"({"key":"third"})").ok()) << "the answer may have been lost";
  EXPECT_EQ(job(first.ref.job).unit_records.at(0).manifest, R"({"key":"second"})");
}

TEST_F(QueueLapse, OnlyTheWorkerThatLostTheLeaseTakesItsCrashBack) {
  const auto first = running();
  lapse(first.ref);
  hand_back({first.ref, "another nonce"});
  hand_back({first.ref, ""});
  run_on("w1:boot", first.ref);
  lapse(first.ref);
  EXPECT_EQ(job(first.ref.job).state, State::kFailed);
}

TEST_F(QueueLapse, AnAttemptKeepsItsNumberWhenACrashIsTakenBack) {
  const auto first = running();
  lapse(first.ref);
  const auto second = assign(first.ref.job);
  hand_back(first);
  EXPECT_TRUE(start(second).ok());
  EXPECT_EQ(latest(first.ref.job)["attempt"], "2");
  EXPECT_EQ(job(first.ref.job).unit_records.at(0).attempt, 2);
}

TEST_F(QueueLapse, AUnitThatDoesNotStopForTwelveLeasesIsLost) {
  const auto attempt = running();
  ASSERT_TRUE(wait(client_->cancel(attempt.ref.job, "", soon())).ok());
  EXPECT_EQ(renew(attempt), RenewOutcome::kCancelRequested);
  // Its record as it is 61 s later.
  auto record = redis({"HGET", keys_.units(), member(attempt.ref)}).text;
  const auto time = redis({"TIME"});
  const auto seconds = std::stoll(time.elements.at(0).text);
  bool found = false;
  for (int ago = 0; ago < 10 && !found; ++ago) {
    const auto at = record.rfind(std::to_string(seconds - ago));
    found = at != std::string::npos;
    if (found) record.replace(at, 10, std::to_string(seconds - ago - 61));
  }
  ASSERT_TRUE(found) << record;
  redis({"HSET", keys_.units(), member(attempt.ref), record});
  EXPECT_EQ(renew(attempt), RenewOutcome::kLost);
  lapse(attempt.ref);
  EXPECT_EQ(job(attempt.ref.job).state, State::kCanceled);
}

TEST_F(QueueLapse, TheThirdErrorOfAUnitIsItsLast) {
  const std::string id = submit();
  admit_all();
  for (int errors = 1; errors <= 3; ++errors) {
    ASSERT_EQ(job(id).state, State::kReady) << errors;
    ASSERT_TRUE(fail(run_on("w:boot", {id, 0})).ok());
    if (errors < 3) retry({id, 0});
  }
  EXPECT_EQ(job(id).state, State::kFailed) << "max_attempts is 3";
  EXPECT_EQ(dead_letter()["errors"], "3");
}

TEST_F(QueueLapse, AUnitCarriesTheWorkersOnWhichItFailed) {
  options_.max_attempts = 20;
  client_ = std::make_unique<queue::Client>(connection_, options_);
  const std::string id = submit();
  admit_all();
  for (const char* worker : {"a", "b", "a"}) {
    ASSERT_TRUE(fail(run_on(std::string(worker) + ":boot", {id, 0})).ok());
    retry({id, 0});
  }
  EXPECT_EQ(latest(id)["failed_on"], "a,b");
  EXPECT_EQ(latest(id).count("lapses"), 0u);
  for (char worker = 'c'; worker < 'l'; ++worker) {
    ASSERT_TRUE(fail(run_on(std::string(1, worker) + ":boot", {id, 0})).ok());
    retry({id, 0});
  }
  EXPECT_EQ(latest(id)["failed_on"], "k,j,i,h,g,f,e,d") << "the latest eight";
  ASSERT_TRUE(fail(run_on("a:boot", {id, 0}), true).ok());  // its device broke down
  EXPECT_EQ(latest(id)["lapses"], "1");
  const auto views = wait(client_->open_units(std::chrono::seconds(10)));
  ASSERT_EQ(views->size(), 1u);
  EXPECT_EQ(views->at(0).lapses, 1);
  EXPECT_EQ(views->at(0).failed_on.at(0), "a");
}

}  // namespace
}  // namespace ditfleet::testing
