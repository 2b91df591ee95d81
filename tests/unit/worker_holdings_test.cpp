// The worker's decisions, with a clock that the test moves.
#include <gtest/gtest.h>

#include "worker/units/holdings.h"

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;
using Kind = Action::Kind;

class HoldingsTest : public testing::Test {
 protected:
  queue::Attempt attempt(int n) const { return {{"job" + std::to_string(n), 0}, "n" + std::to_string(n)}; }

  // "encode n1, start n2"
  std::string decide() {
    std::string text;
    for (const Action& action : holdings_.decide(now_)) {
      static constexpr const char* kNames[] = {"encode", "start", "denoise", "stop", "canceled", "hand-back", "forget"};
      text +=
          (text.empty() ? "" : ", ") + std::string(kNames[static_cast<int>(action.kind)]) + " " + action.attempt.nonce;
    }
    return text;
  }

  void assign(int n) { ASSERT_EQ(holdings_.assign(attempt(n), now_), Holdings::Admitted::kTaken); }

  // Takes unit n to denoising; the device must be free.
  void bring_to_denoising(int n) {
    const std::string nonce = attempt(n).nonce;
    assign(n);
    ASSERT_EQ(decide(), "encode " + nonce);
    holdings_.encoded(nonce);
    ASSERT_EQ(decide(), "start " + nonce);
    holdings_.started(nonce, now_);
    ASSERT_EQ(decide(), "denoise " + nonce);
  }

  // Renews all that is due; all are answered with `outcome`.
  std::size_t renew(queue::RenewOutcome outcome = queue::RenewOutcome::kOk) {
    const auto renewals = holdings_.due_renewals(now_);
    if (!renewals.empty()) {
      holdings_.renewed(renewals, std::vector(renewals.size(), outcome), now_);
    }
    return renewals.size();
  }

  Clock::time_point now_ = Clock::time_point(1h);
  Holdings holdings_{2, {.lease = 5000ms, .renew = 1000ms, .step = 100ms, .retry = 250ms}};
};

TEST_F(HoldingsTest, AUnitWhoseAdaptersAreOnTheirWayIsPassed) {
  ASSERT_EQ(holdings_.assign(attempt(1), now_, true), Holdings::Admitted::kTaken);
  EXPECT_EQ(decide(), "");
  assign(2);
  EXPECT_EQ(decide(), "encode n2");
  holdings_.encoded("n2");
  EXPECT_EQ(decide(), "start n2");
  holdings_.adapters_there("n1");
  EXPECT_EQ(decide(), "encode n1");
}

TEST_F(HoldingsTest, AUnitIsLetGoWhileItsAdaptersAreOnTheirWay) {
  ASSERT_EQ(holdings_.assign(attempt(1), now_, true), Holdings::Admitted::kTaken);
  holdings_.revoke("n1");
  EXPECT_EQ(decide(), "forget n1");
  holdings_.adapters_there("n1");
  EXPECT_EQ(decide(), "");
  EXPECT_TRUE(holdings_.empty());
}

TEST_F(HoldingsTest, TextOfTheNextIsEncodedWhileThePresentOneDenoises) {
  bring_to_denoising(1);
  assign(2);
  EXPECT_EQ(decide(), "encode n2");
  holdings_.encoded("n2");
  EXPECT_EQ(decide(), "") << "the device is taken";
  holdings_.denoised("n1");
  EXPECT_EQ(decide(), "start n2") << "n1 is still being stored";
  holdings_.ended("n1");
  EXPECT_EQ(decide(), "");
  EXPECT_EQ(holdings_.attempts().size(), 1u);
}

TEST_F(HoldingsTest, OneTextAtATimeInOrder) {
  assign(1);
  assign(2);
  EXPECT_EQ(decide(), "encode n1");
  EXPECT_EQ(decide(), "");
  holdings_.encoded("n1");
  EXPECT_EQ(decide(), "start n1, encode n2");
}

TEST_F(HoldingsTest, TakesNoMoreThanItsCapacityAndNothingTwice) {
  bring_to_denoising(1);
  assign(2);
  EXPECT_EQ(holdings_.assign(attempt(3), now_), Holdings::Admitted::kRefused);
  EXPECT_EQ(holdings_.assign(attempt(2), now_), Holdings::Admitted::kDuplicate);
  holdings_.denoised("n1");
  EXPECT_EQ(holdings_.assign(attempt(3), now_), Holdings::Admitted::kTaken) << "what is finishing takes no place";
}

TEST_F(HoldingsTest, ALeaseCountsFromBeforeTheRenewalWasSent) {
  bring_to_denoising(1);
  const auto begun = now_;
  now_ += 1000ms;
  const auto sent = now_;
  const auto renewals = holdings_.due_renewals(now_);
  ASSERT_EQ(renewals.size(), 1u);
  now_ += 3000ms;  // the answer takes its time
  holdings_.renewed(renewals, {queue::RenewOutcome::kOk}, sent);
  EXPECT_EQ(holdings_.lease_until("n1"), begun + 6000ms);
  now_ = begun + 5999ms;
  EXPECT_EQ(decide(), "");
  now_ = begun + 6000ms;
  EXPECT_EQ(decide(), "stop n1");
  EXPECT_EQ(decide(), "") << "told once";
  EXPECT_FALSE(holdings_.may_complete("n1", now_));
  holdings_.stopped("n1");
  EXPECT_EQ(decide(), "hand-back n1");
  EXPECT_TRUE(holdings_.empty());
}

TEST_F(HoldingsTest, ALateAnswerDoesNotReviveALapsedLease) {
  bring_to_denoising(1);
  now_ += 1000ms;
  const auto sent = now_;
  const auto renewals = holdings_.due_renewals(now_);
  now_ += 60s;  // stopped and continued
  EXPECT_EQ(decide(), "stop n1");
  holdings_.renewed(renewals, {queue::RenewOutcome::kOk}, sent);
  EXPECT_FALSE(holdings_.may_complete("n1", now_));
  holdings_.denoised("n1");  // it was the last step: nothing stopped it
  EXPECT_FALSE(holdings_.may_complete("n1", now_));
}

TEST_F(HoldingsTest, WhatLapsedBeforeItStartedIsHandedBackAtOnce) {
  assign(1);
  ASSERT_EQ(decide(), "encode n1");
  now_ += 5000ms;
  EXPECT_EQ(decide(), "hand-back n1");
  assign(2);
  EXPECT_EQ(decide(), "") << "the text thread still works on n1";
  holdings_.encoded("n1");
  EXPECT_EQ(decide(), "encode n2");
}

TEST_F(HoldingsTest, RenewsEverythingInOneCallEverySecond) {
  bring_to_denoising(1);
  assign(2);
  EXPECT_EQ(renew(), 2u);
  now_ += 999ms;
  EXPECT_EQ(renew(), 0u);
  EXPECT_EQ(holdings_.next_wakeup(), now_ + 1ms);
  now_ += 1ms;
  EXPECT_EQ(renew(), 2u);
}

TEST_F(HoldingsTest, AStepIsToldSoonButNotMoreOftenThanTheInterval) {
  bring_to_denoising(1);
  ASSERT_EQ(renew(), 1u);
  now_ += 10ms;
  holdings_.stepped("n1", 1, 4);
  EXPECT_TRUE(holdings_.due_renewals(now_).empty());
  EXPECT_EQ(holdings_.next_wakeup(), now_ + 90ms);
  holdings_.stepped("n1", 2, 4);
  now_ += 90ms;
  const auto renewals = holdings_.due_renewals(now_);
  ASSERT_EQ(renewals.size(), 1u);
  EXPECT_EQ(renewals[0].step, 2) << "the steps between were passed over";
  EXPECT_EQ(renewals[0].total_steps, 4);
  EXPECT_TRUE(holdings_.due_renewals(now_ + 10s).empty()) << "one call at a time";
  holdings_.renewed(renewals, {queue::RenewOutcome::kOk}, now_);
  now_ += 1s;
  EXPECT_EQ(holdings_.due_renewals(now_).at(0).step, 0) << "told once";
}

TEST_F(HoldingsTest, TheLastStepCanBeToldBeforeTheCompletion) {
  bring_to_denoising(1);
  ASSERT_EQ(renew(), 1u);
  holdings_.stepped("n1", 4, 4);
  holdings_.denoised("n1");
  const auto last = holdings_.take_pending_step("n1");
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(last->step, 4);
  EXPECT_FALSE(holdings_.take_pending_step("n1").has_value());
}

TEST_F(HoldingsTest, AFailedRenewalIsRepeatedSoonWithItsStep) {
  bring_to_denoising(1);
  holdings_.stepped("n1", 3, 4);
  const auto renewals = holdings_.due_renewals(now_);
  ASSERT_EQ(renewals.size(), 1u);
  holdings_.renewal_failed(renewals, now_);
  EXPECT_TRUE(holdings_.due_renewals(now_ + 249ms).empty());
  EXPECT_EQ(holdings_.next_wakeup(), now_ + 250ms);
  const auto again = holdings_.due_renewals(now_ + 250ms);
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].step, 3);
}

TEST_F(HoldingsTest, CancelStopsAtAStepAndIsReported) {
  bring_to_denoising(1);
  holdings_.cancel("n1");
  EXPECT_EQ(decide(), "stop n1");
  holdings_.stopped("n1");
  EXPECT_EQ(decide(), "canceled n1");
}

TEST_F(HoldingsTest, CancelIsAlsoHeardFromARenewal) {
  bring_to_denoising(1);
  now_ += 1s;
  EXPECT_EQ(renew(queue::RenewOutcome::kCancelRequested), 1u);
  EXPECT_EQ(decide(), "stop n1");
  EXPECT_EQ(holdings_.stop_of("n1"), Stop::kCanceled);
}

TEST_F(HoldingsTest, ACancelThatComesWhileStoringLetsTheQueueDecide) {
  bring_to_denoising(1);
  holdings_.denoised("n1");
  holdings_.cancel("n1");
  EXPECT_EQ(decide(), "");
  EXPECT_TRUE(holdings_.may_complete("n1", now_));
}

TEST_F(HoldingsTest, WhatIsLostIsForgottenWithoutAWord) {
  bring_to_denoising(1);
  now_ += 1s;
  renew(queue::RenewOutcome::kLost);
  EXPECT_EQ(decide(), "stop n1");
  EXPECT_EQ(renew(), 0u);
  holdings_.cancel("n1");
  holdings_.stopped("n1");
  EXPECT_EQ(decide(), "forget n1");
}

TEST_F(HoldingsTest, ARevokedUnitGoesAndTheNextMovesUp) {
  assign(1);
  assign(2);
  ASSERT_EQ(decide(), "encode n1");
  holdings_.revoke("n1");
  EXPECT_EQ(decide(), "forget n1");
  holdings_.encoded("n1");
  EXPECT_EQ(decide(), "encode n2");
  holdings_.revoke("none");
}

TEST_F(HoldingsTest, ARefusedStartFreesTheDevice) {
  assign(1);
  assign(2);
  decide();
  holdings_.encoded("n1");
  ASSERT_EQ(decide(), "start n1, encode n2");
  holdings_.encoded("n2");
  holdings_.start_refused("n1");
  EXPECT_EQ(decide(), "forget n1, start n2");
}

TEST_F(HoldingsTest, AStartThatWasOvertakenByACancelIsNotRun) {
  assign(1);
  decide();
  holdings_.encoded("n1");
  ASSERT_EQ(decide(), "start n1");
  holdings_.cancel("n1");
  EXPECT_EQ(decide(), "") << "the start's answer is on its way";
  holdings_.started("n1", now_);
  EXPECT_EQ(decide(), "canceled n1");
}

TEST_F(HoldingsTest, AStartGivenUpIsHandedBack) {
  assign(1);
  decide();
  holdings_.encoded("n1");
  ASSERT_EQ(decide(), "start n1");
  now_ += 5s;
  EXPECT_EQ(decide(), "");
  holdings_.stopped("n1");
  EXPECT_EQ(decide(), "hand-back n1");
}

TEST_F(HoldingsTest, FailureFreesItsStage) {
  bring_to_denoising(1);
  assign(2);
  ASSERT_EQ(decide(), "encode n2");
  holdings_.encoded("n2");
  holdings_.failed("n1");
  EXPECT_EQ(decide(), "start n2");
}

TEST_F(HoldingsTest, DrainHandsBackWhatHasNotStartedAndFinishesWhatRuns) {
  bring_to_denoising(1);
  assign(2);
  decide();
  holdings_.drain();
  EXPECT_EQ(decide(), "hand-back n2");
  EXPECT_EQ(holdings_.assign(attempt(3), now_), Holdings::Admitted::kRefused);
  holdings_.denoised("n1");
  EXPECT_FALSE(holdings_.empty());
  holdings_.ended("n1");
  EXPECT_TRUE(holdings_.empty());
}

TEST_F(HoldingsTest, DrainOutOfTimeHandsBackWhatRunsButLetsStoringEnd) {
  bring_to_denoising(1);
  holdings_.denoised("n1");
  bring_to_denoising(2);
  holdings_.drain();
  EXPECT_EQ(decide(), "");
  holdings_.drain_running();
  EXPECT_EQ(decide(), "stop n2");
  holdings_.stopped("n2");
  EXPECT_EQ(decide(), "hand-back n2");
  EXPECT_TRUE(holdings_.may_complete("n1", now_));
}

TEST_F(HoldingsTest, NeverAsksToBeWokenInThePastForever) {
  bring_to_denoising(1);
  for (int i = 0; i < 5; ++i) {
    holdings_.revoke("n1");
    now_ = std::max(now_, std::min(holdings_.next_wakeup(), now_ + 10s));
    decide();
    renew();
    EXPECT_GT(holdings_.next_wakeup(), now_);
    now_ += 6s;
  }
}

TEST_F(HoldingsTest, NothingHeldNothingToDo) {
  EXPECT_EQ(holdings_.next_wakeup(), Clock::time_point::max());
  EXPECT_TRUE(holdings_.due_renewals(now_).empty());
  EXPECT_EQ(decide(), "");
}

}  // namespace
}  // namespace ditfleet::worker
