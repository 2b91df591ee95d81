// The worker's decisions, on a clock that the test moves.
#include <gtest/gtest.h>

#include "worker/units/unit_table.h"

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;
using Kind = Action::Kind;

class UnitTableTest : public testing::Test {
 protected:
  queue::Attempt attempt(int n) const { return {{"job" + std::to_string(n), 0}, "n" + std::to_string(n)}; }

  // "encode n1, start n2"
  std::string decide() {
    std::string text;
    for (const Action& action : table_.decide(now_)) {
      static constexpr const char* kNames[] = {"encode", "start", "denoise", "stop", "canceled", "hand-back", "forget"};
      text +=
          (text.empty() ? "" : ", ") + std::string(kNames[static_cast<int>(action.kind)]) + " " + action.attempt.nonce;
    }
    return text;
  }

  void assign(int n) { ASSERT_EQ(table_.assign(attempt(n), now_), UnitTable::Admission::kAccepted); }

  // Takes unit n to denoising; the device must be free.
  void bring_to_denoising(int n) {
    const std::string nonce = attempt(n).nonce;
    assign(n);
    ASSERT_EQ(decide(), "encode " + nonce);
    table_.encoded(nonce);
    ASSERT_EQ(decide(), "start " + nonce);
    table_.started(nonce, now_);
    ASSERT_EQ(decide(), "denoise " + nonce);
  }

  // Answers every due renewal with `outcome`.
  std::size_t renew(queue::RenewOutcome outcome = queue::RenewOutcome::kOk) {
    const auto renewals = table_.due_renewals(now_);
    if (!renewals.empty()) {
      table_.renewed(renewals, std::vector(renewals.size(), outcome), now_);
    }
    return renewals.size();
  }

  Clock::time_point now_ = Clock::time_point(1h);
  UnitTable table_{2, {.orphan = 60s, .renew = 1000ms, .step = 100ms, .retry = 250ms}};
};

TEST_F(UnitTableTest, LaterUnitsOvertakeAUnitThatWaitsForItsAdapters) {
  ASSERT_EQ(table_.assign(attempt(1), now_, true), UnitTable::Admission::kAccepted);
  EXPECT_EQ(decide(), "");
  assign(2);
  EXPECT_EQ(decide(), "encode n2");
  table_.encoded("n2");
  EXPECT_EQ(decide(), "start n2");
  table_.adapters_ready("n1");
  EXPECT_EQ(decide(), "encode n1");
}

TEST_F(UnitTableTest, AUnitCanBeRevokedWhileItsAdaptersLoad) {
  ASSERT_EQ(table_.assign(attempt(1), now_, true), UnitTable::Admission::kAccepted);
  table_.revoke("n1");
  EXPECT_EQ(decide(), "forget n1");
  table_.adapters_ready("n1");
  EXPECT_EQ(decide(), "");
  EXPECT_TRUE(table_.empty());
}

TEST_F(UnitTableTest, TheNextUnitsTextIsEncodedWhileTheCurrentUnitDenoises) {
  bring_to_denoising(1);
  assign(2);
  EXPECT_EQ(decide(), "encode n2");
  table_.encoded("n2");
  EXPECT_EQ(decide(), "") << "the device is busy";
  table_.denoised("n1");
  EXPECT_EQ(decide(), "start n2") << "n1 is still being stored";
  table_.ended("n1");
  EXPECT_EQ(decide(), "");
  EXPECT_EQ(table_.attempts().size(), 1u);
}

TEST_F(UnitTableTest, TextsAreEncodedOneAtATimeInOrder) {
  assign(1);
  assign(2);
  EXPECT_EQ(decide(), "encode n1");
  EXPECT_EQ(decide(), "");
  table_.encoded("n1");
  EXPECT_EQ(decide(), "start n1, encode n2");
}

TEST_F(UnitTableTest, RefusesUnitsOverItsCapacityAndDuplicates) {
  bring_to_denoising(1);
  assign(2);
  EXPECT_EQ(table_.assign(attempt(3), now_), UnitTable::Admission::kRefused);
  EXPECT_EQ(table_.assign(attempt(2), now_), UnitTable::Admission::kDuplicate);
  table_.denoised("n1");
  EXPECT_EQ(table_.assign(attempt(3), now_), UnitTable::Admission::kAccepted) << "finishing units do not count";
}

// Nobody else can take the unit while the queue is away.
TEST_F(UnitTableTest, AUnitGoesOnWithoutAnAnswerAndIsCompletedAfterwards) {
  bring_to_denoising(1);
  for (const auto begun = now_; now_ < begun + 59s; now_ += 1s) {
    const auto renewals = table_.due_renewals(now_);
    if (!renewals.empty()) table_.renewal_failed(renewals, now_);
    ASSERT_EQ(decide(), "");
  }
  table_.denoised("n1");
  EXPECT_TRUE(table_.may_complete("n1", now_));
  EXPECT_EQ(renew(), 1u);
  now_ += 59s;
  EXPECT_EQ(decide(), "");
  EXPECT_TRUE(table_.may_complete("n1", now_)) << "counted from the last answer";
}

TEST_F(UnitTableTest, ARefusedRenewalStopsTheUnitAtOnce) {
  bring_to_denoising(1);
  now_ += 30s;
  ASSERT_EQ(renew(queue::RenewOutcome::kLost), 1u);
  EXPECT_EQ(decide(), "stop n1");
  EXPECT_FALSE(table_.may_complete("n1", now_));
}

TEST_F(UnitTableTest, AUnitIsOrphanedFromBeforeItsLastAnsweredRenewalWasSent) {
  bring_to_denoising(1);
  const auto begun = now_;
  now_ += 1s;
  const auto sent = now_;
  const auto renewals = table_.due_renewals(now_);
  ASSERT_EQ(renewals.size(), 1u);
  now_ += 3s;  // a slow answer
  table_.renewed(renewals, {queue::RenewOutcome::kOk}, sent);
  now_ = begun + 60'999ms;
  EXPECT_EQ(decide(), "");
  now_ = begun + 61s;
  EXPECT_EQ(decide(), "stop n1");
  EXPECT_EQ(decide(), "") << "returned once";
  EXPECT_FALSE(table_.may_complete("n1", now_));
  table_.stopped("n1");
  EXPECT_EQ(decide(), "hand-back n1");
  EXPECT_TRUE(table_.empty());
}

TEST_F(UnitTableTest, ALateAnswerDoesNotReviveAnOrphan) {
  bring_to_denoising(1);
  now_ += 1s;
  const auto sent = now_;
  const auto renewals = table_.due_renewals(now_);
  now_ += 1h;  // stopped and continued
  EXPECT_EQ(decide(), "stop n1");
  table_.renewed(renewals, {queue::RenewOutcome::kOk}, sent);
  EXPECT_FALSE(table_.may_complete("n1", now_));
  table_.denoised("n1");  // it was the last step: nothing stopped it
  EXPECT_FALSE(table_.may_complete("n1", now_));
}

TEST_F(UnitTableTest, AUnitThatHasNotStartedWaitsForTheQueueToo) {
  assign(1);
  ASSERT_EQ(decide(), "encode n1");
  now_ += 59s;
  EXPECT_EQ(decide(), "");
  now_ += 1s;
  EXPECT_EQ(decide(), "hand-back n1");
  assign(2);
  EXPECT_EQ(decide(), "") << "the text thread is still busy with n1";
  table_.encoded("n1");
  EXPECT_EQ(decide(), "encode n2");
}

TEST_F(UnitTableTest, RenewsAllLeasesInOneCallPerSecond) {
  bring_to_denoising(1);
  assign(2);
  EXPECT_EQ(renew(), 2u);
  now_ += 999ms;
  EXPECT_EQ(renew(), 0u);
  EXPECT_EQ(table_.next_wakeup(), now_ + 1ms);
  now_ += 1ms;
  EXPECT_EQ(renew(), 2u);
}

TEST_F(UnitTableTest, StepsAreReportedAtMostOncePerInterval) {
  bring_to_denoising(1);
  ASSERT_EQ(renew(), 1u);
  now_ += 10ms;
  table_.stepped("n1", 1, 4);
  EXPECT_TRUE(table_.due_renewals(now_).empty());
  EXPECT_EQ(table_.next_wakeup(), now_ + 90ms);
  table_.stepped("n1", 2, 4);
  now_ += 90ms;
  const auto renewals = table_.due_renewals(now_);
  ASSERT_EQ(renewals.size(), 1u);
  EXPECT_EQ(renewals[0].step, 2) << "skips the steps in between";
  EXPECT_EQ(renewals[0].total_steps, 4);
  EXPECT_TRUE(table_.due_renewals(now_ + 10s).empty()) << "one call at a time";
  table_.renewed(renewals, {queue::RenewOutcome::kOk}, now_);
  now_ += 1s;
  EXPECT_EQ(table_.due_renewals(now_).at(0).step, 0) << "returned once";
}

TEST_F(UnitTableTest, TheLastStepCanBeReportedBeforeTheCompletion) {
  bring_to_denoising(1);
  ASSERT_EQ(renew(), 1u);
  table_.stepped("n1", 4, 4);
  table_.denoised("n1");
  const auto last = table_.take_pending_step("n1");
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(last->step, 4);
  EXPECT_FALSE(table_.take_pending_step("n1").has_value());
}

TEST_F(UnitTableTest, AFailedRenewalIsRetriedSoonWithItsStep) {
  bring_to_denoising(1);
  table_.stepped("n1", 3, 4);
  const auto renewals = table_.due_renewals(now_);
  ASSERT_EQ(renewals.size(), 1u);
  table_.renewal_failed(renewals, now_);
  EXPECT_TRUE(table_.due_renewals(now_ + 249ms).empty());
  EXPECT_EQ(table_.next_wakeup(), now_ + 250ms);
  const auto again = table_.due_renewals(now_ + 250ms);
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].step, 3);
}

TEST_F(UnitTableTest, ACancelStopsTheUnitAtAStepAndIsReported) {
  bring_to_denoising(1);
  table_.cancel("n1");
  EXPECT_EQ(decide(), "stop n1");
  table_.stopped("n1");
  EXPECT_EQ(decide(), "canceled n1");
}

TEST_F(UnitTableTest, ARenewalCanReportACancel) {
  bring_to_denoising(1);
  now_ += 1s;
  EXPECT_EQ(renew(queue::RenewOutcome::kCancelRequested), 1u);
  EXPECT_EQ(decide(), "stop n1");
  EXPECT_EQ(table_.stop_reason("n1"), StopReason::kCanceled);
}

TEST_F(UnitTableTest, ACancelDuringStoringIsLeftToTheQueue) {
  bring_to_denoising(1);
  table_.denoised("n1");
  table_.cancel("n1");
  EXPECT_EQ(decide(), "");
  EXPECT_TRUE(table_.may_complete("n1", now_));
}

// The lease may have lapsed meanwhile: the call reports that this worker has not crashed.
TEST_F(UnitTableTest, ALostUnitIsHandedBack) {
  bring_to_denoising(1);
  now_ += 1s;
  renew(queue::RenewOutcome::kLost);
  EXPECT_EQ(decide(), "stop n1");
  EXPECT_EQ(renew(), 0u);
  table_.cancel("n1");
  table_.stopped("n1");
  EXPECT_EQ(decide(), "hand-back n1");
}

TEST_F(UnitTableTest, ARevokedUnitIsForgottenAndTheNextMovesUp) {
  assign(1);
  assign(2);
  ASSERT_EQ(decide(), "encode n1");
  table_.revoke("n1");
  EXPECT_EQ(decide(), "forget n1");
  table_.encoded("n1");
  EXPECT_EQ(decide(), "encode n2");
  table_.revoke("none");
}

TEST_F(UnitTableTest, ARefusedStartFreesTheDevice) {
  assign(1);
  assign(2);
  decide();
  table_.encoded("n1");
  ASSERT_EQ(decide(), "start n1, encode n2");
  table_.encoded("n2");
  table_.start_refused("n1");
  EXPECT_EQ(decide(), "hand-back n1, start n2");
}

TEST_F(UnitTableTest, AUnitCanceledWhileItStartsIsNotRun) {
  assign(1);
  decide();
  table_.encoded("n1");
  ASSERT_EQ(decide(), "start n1");
  table_.cancel("n1");
  EXPECT_EQ(decide(), "") << "the start is not answered yet";
  table_.started("n1", now_);
  EXPECT_EQ(decide(), "canceled n1");
}

TEST_F(UnitTableTest, AUnitWhoseStartIsGivenUpIsHandedBack) {
  assign(1);
  decide();
  table_.encoded("n1");
  ASSERT_EQ(decide(), "start n1");
  now_ += 60s;
  EXPECT_EQ(decide(), "");
  table_.stopped("n1");
  EXPECT_EQ(decide(), "hand-back n1");
}

TEST_F(UnitTableTest, AFailureFreesTheDevice) {
  bring_to_denoising(1);
  assign(2);
  ASSERT_EQ(decide(), "encode n2");
  table_.encoded("n2");
  table_.ended("n1");
  EXPECT_EQ(decide(), "start n2");
}

TEST_F(UnitTableTest, DrainHandsBackUnitsThatHaveNotStartedAndFinishesTheRest) {
  bring_to_denoising(1);
  assign(2);
  decide();
  table_.drain();
  EXPECT_EQ(decide(), "hand-back n2");
  EXPECT_EQ(table_.assign(attempt(3), now_), UnitTable::Admission::kRefused);
  table_.denoised("n1");
  EXPECT_FALSE(table_.empty());
  table_.ended("n1");
  EXPECT_TRUE(table_.empty());
  table_.resume();
  EXPECT_EQ(table_.assign(attempt(4), now_), UnitTable::Admission::kAccepted);
}

// The queue may have told everybody that it has started.
TEST_F(UnitTableTest, DrainLetsAUnitThatIsStartingRun) {
  assign(1);
  decide();
  table_.encoded("n1");
  ASSERT_EQ(decide(), "start n1");
  table_.drain();
  EXPECT_EQ(decide(), "");
  table_.started("n1", now_);
  EXPECT_EQ(decide(), "denoise n1");
}

TEST_F(UnitTableTest, DrainRunningHandsBackTheDenoisingUnitButNotTheFinishingOne) {
  bring_to_denoising(1);
  table_.denoised("n1");
  bring_to_denoising(2);
  table_.drain();
  EXPECT_EQ(decide(), "");
  table_.drain_running();
  EXPECT_EQ(decide(), "stop n2");
  table_.stopped("n2");
  EXPECT_EQ(decide(), "hand-back n2");
  EXPECT_TRUE(table_.may_complete("n1", now_));
}

TEST_F(UnitTableTest, PausedUnitStopsAndIsHandedBackButAFinishingOneEnds) {
  bring_to_denoising(1);
  table_.denoised("n1");
  bring_to_denoising(2);
  assign(3);
  decide();
  for (const char* nonce : {"n1", "n2", "n3", "gone"}) table_.pause(nonce);
  EXPECT_EQ(decide(), "stop n2, hand-back n3");
  table_.pause("n2");
  EXPECT_EQ(decide(), "") << "twice";
  table_.stopped("n2");
  EXPECT_EQ(decide(), "hand-back n2");
  EXPECT_TRUE(table_.may_complete("n1", now_));
}

TEST_F(UnitTableTest, CancelOfAUnitThatPausesWins) {
  bring_to_denoising(1);
  table_.pause("n1");
  decide();
  table_.cancel("n1");
  table_.stopped("n1");
  EXPECT_EQ(decide(), "canceled n1");
}

TEST_F(UnitTableTest, TheNextWakeupIsNotInThePast) {
  bring_to_denoising(1);
  for (int i = 0; i < 5; ++i) {
    table_.revoke("n1");
    now_ = std::max(now_, std::min(table_.next_wakeup(), now_ + 100s));
    decide();
    renew();
    EXPECT_GT(table_.next_wakeup(), now_);
    now_ += 61s;
  }
}

TEST_F(UnitTableTest, AnEmptyTableHasNothingToDo) {
  EXPECT_EQ(table_.next_wakeup(), Clock::time_point::max());
  EXPECT_TRUE(table_.due_renewals(now_).empty());
  EXPECT_EQ(decide(), "");
}

}  // namespace
}  // namespace ditfleet::worker
