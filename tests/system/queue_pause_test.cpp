// Jobs that are paused and resumed, in every state and beside every other call.
#include <gmock/gmock.h>

#include <random>

#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;
using queue::PauseOutcome;
using queue::RenewOutcome;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Kind = queue::MailboxEntry::Kind;

class QueuePause : public QueueTest {
 protected:
  void SetUp() override {
    lead();
    reap();  // the first call starts the grace of this Redis
  }
  static std::string member(const queue::UnitRef& ref) { return ref.job + ":" + std::to_string(ref.unit); }
  PauseOutcome pause(const std::string& id, const std::string& tenant = "") {
    auto done = wait(client_->pause(id, tenant, soon()));
    EXPECT_TRUE(done.ok()) << (done ? "" : done.error().message);
    return done ? *done : PauseOutcome::kAlreadyEnded;
  }
  PauseOutcome resume(const std::string& id, const std::string& tenant = "") {
    auto done = wait(client_->resume(id, tenant, soon()));
    EXPECT_TRUE(done.ok()) << (done ? "" : done.error().message);
    return done ? *done : PauseOutcome::kAlreadyEnded;
  }
  void hand_back(const queue::Attempt& attempt) {
    EXPECT_TRUE(wait(client_->hand_back(std::span(&attempt, 1), soon())).ok());
  }
  bool hold(const queue::Attempt& attempt) {
    auto done = wait(client_->hold(attempt, soon()));
    EXPECT_TRUE(done.ok()) << (done ? "" : done.error().message);
    return done && *done;
  }
  State state(const std::string& id, int unit = -1) {
    const auto record = job(id);
    return unit < 0 ? record.state : record.unit_records.at(static_cast<std::size_t>(unit)).state;
  }
  State listed(const std::string& id) {
    auto page = wait(client_->list("", std::nullopt, 100, "", soon()));
    for (const auto& one : page->jobs)
      if (one.id == id) return one.state;
    return State::kRejected;
  }
  bool may_assign(const queue::UnitRef& ref) {
    const queue::AssignRequest request{ref, new_nonce(), "warm"};
    auto done = wait(client_->assign(epoch_, "w9:boot9", std::span(&request, 1), soon()));
    return done.ok() && done->front();
  }
  std::vector<Kind> mail(const std::string& owner = "w0:boot0") {
    std::vector<Kind> kinds;
    auto entries = wait(client_->read_mailbox(owner, "0", 100, std::chrono::milliseconds(1)));
    for (const auto& entry : *entries) kinds.push_back(entry.kind);
    return kinds;
  }
  std::vector<std::string> marks() {
    std::vector<std::string> out;
    for (const auto& one : redis({"SMEMBERS", keys_.paused()}).elements) out.push_back(one.text);
    return out;
  }
  // A checkpoint as a worker stores it, with two chunks in Redis.
  void store_checkpoint(const queue::UnitRef& ref) {
    const std::string blob = "df:{0}:blob:" + member(ref) + ":n";
    redis({"SET", blob, "x"});
    redis({"SET", blob + ":1", "x"});
    const std::string record = R"({"step":3,"manifest":{"key":")" + blob + R"(","bytes":1048577},"of":{}})";
    EXPECT_TRUE(wait(client_->give_checkpoint(ref, record, soon())).ok());
  }
  std::size_t stored(const std::string& id) { return redis({"KEYS", "df:{0}:*:" + id + ":*"}).elements.size(); }
};

TEST_F(QueuePause, QueuedJobWaitsAfterItsAdmissionToo) {
  const auto id = submit();
  EXPECT_EQ(pause(id), PauseOutcome::kDone);
  EXPECT_EQ(pause(id), PauseOutcome::kDone) << "twice";
  EXPECT_EQ(state(id), State::kPaused);
  EXPECT_EQ(listed(id), State::kPaused);
  admit_all(2);
  EXPECT_EQ(state(id), State::kPaused);
  EXPECT_EQ(listed(id), State::kPaused);
  EXPECT_FALSE(may_assign({id, 0}));
  EXPECT_FALSE(may_assign({id, 1}));
  EXPECT_EQ(wait(client_->depth(soon()))->ready_units, 0u);
  EXPECT_EQ(event_types(id), "queued paused ready:0 ready:1 ready:0 ready:1");
  EXPECT_EQ(resume(id), PauseOutcome::kDone);
  EXPECT_EQ(resume(id), PauseOutcome::kDone) << "twice";
  EXPECT_EQ(state(id), State::kReady);
  EXPECT_THAT(marks(), IsEmpty());
  EXPECT_TRUE(may_assign({id, 0}));
}

TEST_F(QueuePause, QueuedJobThatIsResumedBeforeItsAdmissionRuns) {
  const auto id = submit();
  pause(id);
  resume(id);
  EXPECT_EQ(state(id), State::kQueued);
  EXPECT_EQ(event_types(id), "queued paused resumed");
  admit_all();
  EXPECT_TRUE(may_assign({id, 0}));
}

TEST_F(QueuePause, AssignedUnitIsTakenBackFromAnyWorker) {
  const auto id = submit();
  admit_all();
  const auto attempt = assign(id);
  EXPECT_EQ(pause(id), PauseOutcome::kDone);
  EXPECT_THAT(mail(), ElementsAre(Kind::kAssign, Kind::kRevoke));
  EXPECT_FALSE(start(attempt).ok());
  EXPECT_EQ(state(id), State::kPaused);
  EXPECT_EQ(job(id).unit_records[0].attempt, 0);
}

TEST_F(QueuePause, RunningUnitIsAskedToStopAndHandsItselfBack) {
  const auto attempt = running();
  const auto& id = attempt.ref.job;
  renew(attempt, 7);
  EXPECT_EQ(pause(id), PauseOutcome::kDone);
  EXPECT_THAT(mail(), ElementsAre(Kind::kAssign, Kind::kPause));
  EXPECT_EQ(state(id), State::kRunning);
  EXPECT_EQ(renew(attempt, 8), RenewOutcome::kOk) << "a worker that does not know of pauses goes on";
  hand_back(attempt);
  EXPECT_EQ(state(id), State::kPaused);
  EXPECT_EQ(listed(id), State::kPaused);
  EXPECT_EQ(job(id).unit_records[0].step, 8) << "what it has reached is shown";
  EXPECT_FALSE(may_assign(attempt.ref));
  resume(id);
  EXPECT_EQ(state(id), State::kReady);
  const auto next = assign(id, 0, "w1:boot1");
  ASSERT_TRUE(start(next).ok());
  ASSERT_TRUE(complete(next).ok());
  EXPECT_EQ(event_types(id),
            "queued ready:0 assigned:0 started:0 step:0 step:0 ready:0 ready:0 assigned:0 started:0 succeeded:0 "
            "succeeded");
}

TEST_F(QueuePause, WorkerThatFinishesMeanwhileEndsTheJob) {
  const auto attempt = running();
  pause(attempt.ref.job);
  ASSERT_TRUE(complete(attempt).ok());
  EXPECT_EQ(state(attempt.ref.job), State::kSucceeded);
  EXPECT_EQ(pause(attempt.ref.job), PauseOutcome::kAlreadyEnded);
  EXPECT_EQ(resume(attempt.ref.job), PauseOutcome::kAlreadyEnded);
}

TEST_F(QueuePause, ResumeBeforeTheWorkerHandsBack) {
  const auto attempt = running();
  pause(attempt.ref.job);
  resume(attempt.ref.job);
  EXPECT_EQ(state(attempt.ref.job), State::kRunning);
  hand_back(attempt);
  EXPECT_EQ(state(attempt.ref.job), State::kReady);
  EXPECT_TRUE(may_assign(attempt.ref));
}

TEST_F(QueuePause, LeaseOfAUnitThatStopsMayLapse) {
  const auto attempt = running();
  const auto& id = attempt.ref.job;
  pause(id);
  redis({"ZADD", keys_.lease(), "XX", "1", member(attempt.ref)});
  EXPECT_GE(reap(), 1);
  EXPECT_EQ(state(id), State::kPaused);
  EXPECT_EQ(job(id).unit_records[0].attempt, 1) << "the lapse counts";
  hand_back(attempt);  // it was only cut off
  EXPECT_EQ(state(id), State::kPaused);
  resume(id);
  EXPECT_TRUE(may_assign(attempt.ref));
}

TEST_F(QueuePause, FailedUnitWaitsWhenItsRetryIsDue) {
  const auto attempt = running();
  const auto& id = attempt.ref.job;
  pause(id);
  queue::Failure failure{.attempt = attempt, .error = {Code::kOutOfMemory, "[test] no memory"}, .retryable = true};
  ASSERT_TRUE(wait(client_->fail(failure, soon())).ok());
  redis({"ZADD", keys_.delayed(), "XX", "1", member(attempt.ref)});
  EXPECT_EQ(reap(), 1);
  EXPECT_EQ(state(id), State::kPaused);
  EXPECT_EQ(reap(), 0);
  resume(id);
  EXPECT_TRUE(may_assign(attempt.ref));
}

// As when Redis' clock was set back, or a Redis lost a part of its data.
TEST_F(QueuePause, UnitThatIsDueByMistakeStaysPaused) {
  const auto attempt = running();
  const auto& id = attempt.ref.job;
  pause(id);
  hand_back(attempt);
  const auto events = event_types(id);
  redis({"ZREM", keys_.delayed(), member(attempt.ref)});
  EXPECT_EQ(wait(client_->mend(epoch_, std::chrono::seconds(5)))->put_back, 1);
  EXPECT_EQ(reap(), 1);
  EXPECT_EQ(state(id), State::kPaused);
  EXPECT_EQ(event_types(id), events) << "nobody is told again";
}

TEST_F(QueuePause, CancelAndDeadlineEndAPausedJobAndItsCheckpoint) {
  for (const char* how : {"cancel", "deadline", "queued"}) {
    queue::Submission s = submission();
    if (how == std::string("deadline")) s.deadline_in_ms = 3'600'000;
    const auto id = submit(s);
    if (how == std::string("queued")) {
      store_checkpoint({id, 0});
      pause(id);
    } else {
      admit_all();
      const auto attempt = assign(id);
      ASSERT_TRUE(start(attempt).ok());
      pause(id);
      hand_back(attempt);
      store_checkpoint(attempt.ref);
    }
    EXPECT_EQ(stored(id), 3u);
    if (how == std::string("deadline")) {
      redis({"ZADD", keys_.deadline(), "XX", "1", id});
      EXPECT_EQ(reap(), 1);
      EXPECT_EQ(state(id), State::kExpired);
    } else {
      EXPECT_EQ(*wait(client_->cancel(id, "", soon())), queue::CancelOutcome::kCanceled);
      EXPECT_EQ(state(id), State::kCanceled);
    }
    EXPECT_EQ(stored(id), 0u) << how;
    EXPECT_FALSE(redis({"SISMEMBER", keys_.paused(), id + ":0"}).integer) << how;
  }
}

TEST_F(QueuePause, OnlyTheAttemptThatRunsStoresACheckpoint) {
  const auto attempt = running();
  const auto store = [&](const queue::Attempt& of, const char* text) {
    return wait(client_->store_checkpoint(of, text, soon()));
  };
  ASSERT_TRUE(store(attempt, "first").ok());
  hand_back(attempt);
  EXPECT_EQ(store(attempt, "late").error().code, Code::kConflict);
  const auto next = assign(attempt.ref.job, 0);
  EXPECT_EQ(store(next, "early").error().code, Code::kConflict) << "it has not started";
  ASSERT_TRUE(start(next).ok());
  EXPECT_EQ(store(attempt, "late").error().code, Code::kConflict);
  EXPECT_EQ(*wait(client_->checkpoint(attempt.ref, soon())), "first");
  ASSERT_TRUE(store(next, "second").ok());
  EXPECT_GT(redis({"PTTL", keys_.checkpoint(attempt.ref.job, 0)}).integer, 3'500'000);
  ASSERT_TRUE(complete(next).ok());
  EXPECT_EQ(store(next, "late").error().code, Code::kConflict);
  EXPECT_EQ(*wait(client_->checkpoint(attempt.ref, soon())), "") << "it ends with its unit";
}

TEST_F(QueuePause, FailedUnitLeavesNoCheckpoint) {
  const auto attempt = running();
  store_checkpoint(attempt.ref);
  queue::Failure failure{.attempt = attempt, .error = {Code::kInvalidArgument, "[test] wrong"}};
  ASSERT_TRUE(wait(client_->fail(failure, soon())).ok());
  EXPECT_EQ(stored(attempt.ref.job), 0u);
}

TEST_F(QueuePause, JobThatIsBeingCanceledIsLeftAlone) {
  const auto attempt = running();
  EXPECT_EQ(*wait(client_->cancel(attempt.ref.job, "", soon())), queue::CancelOutcome::kRequested);
  EXPECT_EQ(pause(attempt.ref.job), PauseOutcome::kCanceling);
  EXPECT_EQ(resume(attempt.ref.job), PauseOutcome::kCanceling);
  EXPECT_FALSE(hold(attempt));
  hand_back(attempt);
  EXPECT_EQ(state(attempt.ref.job), State::kCanceled);
}

TEST_F(QueuePause, CancelOfAUnitThatWasAskedToStop) {
  const auto attempt = running();
  pause(attempt.ref.job);
  EXPECT_EQ(*wait(client_->cancel(attempt.ref.job, "", soon())), queue::CancelOutcome::kRequested);
  hand_back(attempt);
  EXPECT_EQ(state(attempt.ref.job), State::kCanceled);
}

TEST_F(QueuePause, OneUnitHoldsAndTheOthersGoOn) {
  const auto first = running(3);
  const auto& id = first.ref.job;
  const auto second = assign(id, 1);
  ASSERT_TRUE(start(second).ok());
  EXPECT_TRUE(hold(first));
  EXPECT_FALSE(hold(first)) << "it is not held any more";
  EXPECT_EQ(state(id, 0), State::kPaused);
  EXPECT_EQ(state(id), State::kRunning);
  ASSERT_TRUE(complete(second).ok());
  EXPECT_EQ(state(id), State::kRunning) << "the third is ready";
  pause(id);
  EXPECT_EQ(state(id), State::kPaused) << "all that is open";
  EXPECT_EQ(listed(id), State::kPaused);
  resume(id);
  EXPECT_EQ(state(id, 0), State::kReady);
  EXPECT_EQ(state(id, 2), State::kReady);
}

TEST_F(QueuePause, SurvivesAnotherLeaderAndShowsTheSchedulerNothingNew) {
  const auto attempt = running();
  pause(attempt.ref.job);
  hand_back(attempt);
  redis({"DEL", keys_.leader()});
  epoch_ = 0;
  lead();
  const auto open = *wait(client_->open_units(std::chrono::seconds(5)));
  ASSERT_EQ(open.size(), 1u);
  EXPECT_EQ(open[0].state, State::kReady);
  EXPECT_GT(open[0].not_before_ms, 4'000'000'000'000);
  EXPECT_EQ(reap(), 0);
  EXPECT_FALSE(may_assign(attempt.ref));
  resume(attempt.ref.job);
  EXPECT_TRUE(may_assign(attempt.ref));
}

TEST_F(QueuePause, OnlyItsTenantMay) {
  auto s = submission();
  s.tenant = "acme";
  const auto id = submit(s);
  EXPECT_EQ(wait(client_->pause(id, "other", soon())).error().code, Code::kNotFound);
  EXPECT_EQ(wait(client_->resume(id, "other", soon())).error().code, Code::kNotFound);
  EXPECT_EQ(wait(client_->pause("no job", "", soon())).error().code, Code::kNotFound);
  EXPECT_EQ(pause(id, "acme"), PauseOutcome::kDone);
  EXPECT_EQ(wait(client_->use(soon()))->at("acme").units, 1) << "it counts against the quotas";
}

TEST_F(QueuePause, CheckpointsOfPausedUnitsAreKept) {
  const auto attempt = running();
  store_checkpoint(attempt.ref);
  EXPECT_THAT(*wait(client_->keep_checkpoints(soon())), IsEmpty());
  pause(attempt.ref.job);
  hand_back(attempt);
  redis({"PEXPIRE", keys_.checkpoint(attempt.ref.job, 0), "60000"});
  EXPECT_EQ(wait(client_->keep_checkpoints(soon()))->size(), 1u);
  EXPECT_GT(redis({"PTTL", keys_.checkpoint(attempt.ref.job, 0)}).integer, 3'500'000);
}

// Any order of calls: no unit runs while its job is paused, none is lost, and a resumed job ends.
TEST_F(QueuePause, AnyOrderOfCalls) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const auto id = submit();
    bool admitted = false, paused = false, ended = false;
    std::optional<queue::Attempt> held;
    bool started = false;
    std::string did;
    for (int i = 0; i < 12 && !ended; ++i) {
      const auto call = random() % 9;
      did += " " + std::to_string(call);
      if (call == 0 && !admitted) {
        admit_all();
        admitted = true;
      } else if (call <= 1) {
        ASSERT_EQ(pause(id), PauseOutcome::kDone) << did;
        paused = true;
        if (held && !started) held.reset();
      } else if (call == 2) {
        ASSERT_EQ(resume(id), PauseOutcome::kDone) << did;
        paused = false;
      } else if (call == 3 && admitted && !held) {
        const queue::Attempt attempt{{id, 0}, new_nonce()};
        const queue::AssignRequest request{attempt.ref, attempt.nonce, "warm"};
        const bool assigned = wait(client_->assign(epoch_, "w0:b", std::span(&request, 1), soon()))->front();
        if (paused) ASSERT_FALSE(assigned) << did;
        if (assigned) held = attempt, started = false;
      } else if (call == 4 && held && !started) {
        started = start(*held).ok();
      } else if (call == 5 && held) {
        hand_back(*held);
        held.reset();
      } else if (call == 6 && held && started) {
        redis({"ZADD", keys_.lease(), "XX", "1", member(held->ref)});
        reap();
        if (random() % 2) hand_back(*held);  // forgives
        held.reset();
      } else if (call == 7 && held && started) {
        if (hold(*held)) held.reset();
      } else if (call == 8 && held && started && random() % 3 == 0) {
        ASSERT_TRUE(complete(*held).ok()) << did;
        ended = true;
      }
      if (!ended && paused && !held) ASSERT_EQ(state(id), State::kPaused) << did;
    }
    if (ended) continue;
    if (!admitted) admit_all();
    if (held) hand_back(*held);
    ASSERT_EQ(resume(id), PauseOutcome::kDone) << did;
    if (job::is_terminal(state(id))) continue;  // lost too many workers
    const auto attempt = assign(id);
    ASSERT_TRUE(start(attempt).ok()) << did;
    ASSERT_TRUE(complete(attempt).ok()) << did;
  }
  for (const auto& mark : marks()) EXPECT_EQ(mark.find(':'), std::string::npos) << mark;
}

}  // namespace
}  // namespace ditfleet::testing
