// What a model's memory plan depends on: other models, earlier requests, and what ran out of memory.
#include "pipeline/memory/plan_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ditfleet::pipeline {
namespace {

using std::chrono::minutes, std::chrono::seconds;
using ::testing::ElementsAre;

const PlanState::Time kStart = PlanState::Time() + minutes(1000);
const RequestSize kSmall{.width = 10, .height = 10}, kLarge{.width = 20, .height = 20};

// The resident plan needs 1000 bytes and `decode`, the model plan 910, the block plan 510 and the blocks that stay.
MemoryNeeds needs_of(std::int64_t decode = 0) {
  MemoryNeeds needs;
  needs.text = {100, 10};
  needs.blocks = {400, 0};
  needs.fixed = 500;
  needs.decode = decode;
  return needs;
}

PlanState state_of(const std::string& offload = "auto") {
  return PlanState(offload, {kSmall, needs_of(100)}, {kLarge, needs_of(400)});
}

std::string text_of(const PlanChoice& choice) {
  if (!choice.plan) return "none";
  return std::string(name_of(choice.plan->kind)) + ' ' + std::to_string(choice.plan->keep_blocks);
}

TEST(PlanState, AvoidsForAMinuteWhatRanOutOfMemory) {
  PlanState state = state_of();
  state.begin(kSmall, needs_of(), kStart);
  const auto chosen = [&](const RequestSize& size, PlanState::Time now) {
    return text_of(state.choose(size, needs_of(), 2000, now));
  };
  ASSERT_EQ(chosen(kSmall, kStart), "resident 400");
  EXPECT_EQ(state.ran_out(kSmall, kStart).bytes, 1000) << "no plan is applied, so the resident one ran out";
  EXPECT_EQ(chosen(kSmall, kStart + seconds(59)), "model 400");
  EXPECT_EQ(chosen(kLarge, kStart + seconds(59)), "resident 400") << "other sizes keep their plans";
  EXPECT_EQ(chosen(kSmall, kStart + seconds(60)), "resident 400");
  state.set_plan({.kind = PlanKind::kModel, .keep_encoders = false, .keep_blocks = 400, .bytes = 910});
  EXPECT_EQ(state.ran_out(kSmall, kStart).kind, PlanKind::kModel);
  EXPECT_FALSE(state.plan());
  EXPECT_EQ(chosen(kSmall, kStart), "block 343") << "a sixteenth less than what ran out";
  state.forget_ran_out(kSmall);
  EXPECT_EQ(chosen(kSmall, kStart), "resident 400");
}

TEST(PlanState, KeepsOnlyTheBlocksWhoseCopiesAStepCannotHide) {
  PlanState state = state_of("block");
  const auto chosen = [&] { return text_of(state.choose(kSmall, needs_of(), 2000, kStart)); };
  EXPECT_FALSE(state.is_timed(kSmall));
  EXPECT_EQ(chosen(), "block 0");
  state.set_hidden(kSmall, 150);
  EXPECT_TRUE(state.is_timed(kSmall));
  EXPECT_EQ(chosen(), "block 250");
  EXPECT_FALSE(state.is_timed(kLarge));
}

TEST(PlanState, TheLeastUsedModelsLeave) {
  PlanState state = state_of(), often = state_of(), seldom = state_of(), long_ago = state_of();
  for (PlanState* one : {&often, &often, &seldom}) one->begin(kSmall, {}, kStart);
  for (int i = 0; i < 3; ++i) long_ago.begin(kSmall, {}, kStart - minutes(60));
  EXPECT_NEAR(often.use_rate(kStart + minutes(10)), 2 / 2.71828, 1e-3);
  const PlanState::Models models{{&often, 300}, {&state, 77}, {&long_ago, 300}, {&seldom, 300}};
  const auto leaving = [&](std::int64_t available) {
    return state.decide(kSmall, needs_of(), models, available, kStart).leaving;
  };
  EXPECT_THAT(leaving(1900), ElementsAre());
  EXPECT_THAT(leaving(1899), ElementsAre(2));
  EXPECT_THAT(leaving(1600), ElementsAre(2));
  EXPECT_THAT(leaving(1599), ElementsAre(2, 3));
  EXPECT_THAT(leaving(1000), ElementsAre(2, 3, 0));
  EXPECT_EQ(text_of(state.decide(kSmall, needs_of(), models, 999, kStart).choice), "model 400");
  EXPECT_EQ(text_of(state.decide(kSmall, needs_of(), models, 509, kStart).choice), "none");
}

TEST(PlanState, APlanThatIsAboutAsGoodStays) {
  PlanState state = state_of();
  const auto decided = [&](std::int64_t keep_blocks, std::int64_t available) {
    state.set_plan({.kind = PlanKind::kBlock, .keep_encoders = false, .keep_blocks = keep_blocks});
    return state.decide(kSmall, needs_of(), {}, available, kStart);
  };
  EXPECT_TRUE(decided(190, 710).applied);
  EXPECT_EQ(decided(190, 710).choice.plan->bytes, 700) << "the prediction is that of the new request";
  EXPECT_FALSE(decided(179, 710).applied) << "less than nine tenths of 200";
  EXPECT_FALSE(decided(201, 710).applied) << "no longer fits";
  EXPECT_EQ(text_of(decided(201, 710).choice), "block 200");
}

TEST(PlanState, ExcessRisesAtOnceAndFallsSlowly) {
  PlanState state = state_of();
  const auto excess_after = [&](std::int64_t observed) {
    EXPECT_EQ(state.observe(kSmall, needs_of(300), /*left=*/100, observed), 200);
    return state.needs_beside({}, kSmall, {}).decode;
  };
  EXPECT_EQ(excess_after(240), 40);
  EXPECT_EQ(excess_after(200), 20);
  EXPECT_EQ(excess_after(100), 10) << "less than predicted is no excess";
  EXPECT_EQ(excess_after(300), 100);
  EXPECT_EQ(state.needs_beside({}, kSmall, {}).denoise, 100);
  EXPECT_EQ(state.needs_beside({}, kLarge, {}).denoise, 0);
}

TEST(PlanState, CountsWhatOtherModelsNeedMeanwhile) {
  const PlanState state = state_of();
  PlanState other = state_of();
  MemoryNeeds encodes = needs_of();
  encodes.encode = 70;
  other.begin(kSmall, encodes, kStart);
  const MemoryNeeds needs = state.needs_beside({{&state, 1}, {&other, 0}}, kSmall, needs_of());
  EXPECT_EQ(needs.fixed, 1000);
  EXPECT_EQ(needs.others_encode, 80);
}

TEST(PlanState, LimitsFollowThePixelsOfTheSamples) {
  const auto limits = [](const char* offload, std::int64_t available) {
    std::string text;
    for (const auto& [plan, pixels] : state_of(offload).limits({}, available))
      text += plan + ' ' + std::to_string(pixels) + ' ';
    return text;
  };
  EXPECT_EQ(limits("auto", 1250), "resident 250 model 340 block 740 ");
  EXPECT_EQ(limits("model", 1250), "model 340 ");
  EXPECT_EQ(limits("auto", 950), "model 40 block 440 ") << "a plan that holds no request is left out";
  EXPECT_EQ(limits("none", 950), "resident 0 ");
}

}  // namespace
}  // namespace ditfleet::pipeline
