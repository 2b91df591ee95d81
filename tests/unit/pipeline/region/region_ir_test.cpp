// The region compiler's IR: sizes, typing, messages, printing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "pipeline/families/flux/block_programs.h"
#include "pipeline/region/fusion/plan.h"
#include "pipeline/region/ir/builder.h"
#include "tests/unit/pipeline/region/region_temporal_block.h"

namespace ditfleet::region {
namespace {

using ::testing::HasSubstr;
using Ref = Builder::Ref;

const Dim kBatch = Dim::symbol("batch"), kTokens = Dim::symbol("tokens");

TEST(RegionDim, KeepsOneForm) {
  const Dim image = Dim::symbol("image"), text = Dim::symbol("text");
  EXPECT_EQ(image + text, text + image);
  EXPECT_EQ((image + text) * kBatch, kBatch * text + image * kBatch);
  EXPECT_EQ((image + text - text).text(), "image");
  EXPECT_EQ((Dim(2) * image * kBatch + Dim(3)).text(), "3 + 2·batch·image");
  EXPECT_EQ((image - image).text(), "0");
  EXPECT_TRUE((image - image).is_static());
  EXPECT_TRUE((image + text - image).never_negative());
  EXPECT_FALSE((image - text).never_negative());
  EXPECT_EQ(((image + text) * Dim(3)).evaluate({{"image", 4}, {"text", 5}}), 27);
  EXPECT_EQ(image.evaluate({}), -1);
  EXPECT_EQ((image * text).bind({{"text", 2}}).text(), "2·image");
}

std::vector<Program> every_block(ElementType type) {
  const BlockShape shape{.heads = 6, .head_dim = 32, .type = type};
  std::vector<Program> programs;
  for (auto made : {flux_double_block(shape), flux_single_block(shape), temporal_block(shape)}) {
    EXPECT_TRUE(made) << made.error().message;
    if (made) programs.push_back(std::move(made).value());
  }
  return programs;
}

TEST(RegionBlocks, AreValidAndDiffer) {
  std::set<std::string> seen;
  for (ElementType type : {ElementType::kF32, ElementType::kBF16})
    for (const Program& program : every_block(type)) {
      EXPECT_TRUE(verify(program)) << program.block;
      EXPECT_TRUE(seen.insert(print(program)).second) << program.block << " reads as another block does";
    }
}

TEST(RegionBlocks, HaveTheSymbolsTheyShould) {
  const auto programs = every_block(ElementType::kF32);
  EXPECT_THAT(programs[0].symbols(), ::testing::UnorderedElementsAre("batch", "image", "text"));
  EXPECT_THAT(programs[1].symbols(), ::testing::UnorderedElementsAre("batch", "tokens"));
  EXPECT_THAT(programs[2].symbols(), ::testing::UnorderedElementsAre("batch", "frames", "places"));
}

TEST(RegionBlocks, BindSizes) {
  const Program bound = every_block(ElementType::kF32)[2].bind({{"frames", 49}});
  EXPECT_TRUE(verify(bound));
  EXPECT_THAT(print(bound), HasSubstr("%video: f32 [batch, 49, places, 192]"));
}

TEST(RegionBlocks, Print) {
  const std::string text = print(every_block(ElementType::kBF16)[1]);
  EXPECT_THAT(text, HasSubstr("region flux.single\n"));
  EXPECT_THAT(text, HasSubstr("parameter %qkv.weight: bf16 [576, 192]"));
  EXPECT_THAT(text, HasSubstr("%modulated: bf16 [batch, tokens, 192] = modulate(%modulated.norm, %scale, %shift)"));
  EXPECT_THAT(text, HasSubstr("layer_norm(%tokens, eps 1e-06)"));
  EXPECT_THAT(text, HasSubstr("return %after"));
}

// Each row: a block that is wrong in one way, and what the message must say.
TEST(RegionVerify, NamesBlockAndOpAndWhatWouldBeRight) {
  const auto message = [](auto build) {
    Builder b("block", ElementType::kF32);
    const Ref x = b.activation("x", {kBatch, kTokens, 64});
    const Ref made = build(b, x);
    const auto program = b.finish({made});
    EXPECT_FALSE(program);
    return program ? std::string() : program.error().message;
  };
  EXPECT_THAT(message([](Builder& b, Ref x) { return b.linear("y", x, b.linear_slots("w", 32, 8)); }),
              HasSubstr("[block] y = linear: x is [batch, tokens, 64] and the weight [8, 32]; x must end in 32"));
  EXPECT_THAT(message([](Builder& b, Ref x) { return b.rms_norm("y", x, b.parameter("w", {32}), 1e-6); }),
              HasSubstr("[block] y = rms_norm: the weight is [32]; it must be [64]"));
  EXPECT_THAT(message([](Builder& b, Ref x) { return b.layer_norm("y", x, 0); }), HasSubstr("eps must be above 0"));
  EXPECT_THAT(message([](Builder& b, Ref x) {
                return b.mul("y", x, b.activation("z", {kBatch, 2, 64}));
              }),
              HasSubstr("does not broadcast to [batch, tokens, 64]"));
  EXPECT_THAT(message([](Builder& b, Ref x) { return b.rope("y", x, b.table("t", ElementType::kBF16, {64})); }),
              HasSubstr("[block] y = rope: the table %t must be f32"));
}

TEST(RegionBuilder, SwigluGatesTheSecondHalfByTheFirst) {
  Builder b("block", ElementType::kBF16);
  const auto program = b.finish({b.swiglu("y", b.activation("x", {kBatch, kTokens, 64}))});
  ASSERT_TRUE(program) << program.error().message;
  const std::string text = print(*program);
  EXPECT_THAT(text, HasSubstr("%y.gate: bf16 [batch, tokens, 32] = slice(%x, axis 2, from 0)"));
  EXPECT_THAT(text, HasSubstr("%y.up: bf16 [batch, tokens, 32] = slice(%x, axis 2, from 32)"));
  EXPECT_THAT(text, HasSubstr("%y.silu: bf16 [batch, tokens, 32] = silu(%y.gate)"));
  EXPECT_THAT(text, HasSubstr("%y: bf16 [batch, tokens, 32] = mul(%y.silu, %y.up)"));
}

TEST(RegionBuilder, ANormMayHaveNoWeight) {
  Builder b("block", ElementType::kF32);
  const Ref x = b.activation("x", {kBatch, kTokens, 64});
  auto program = b.finish({b.rms_norm("y", x, {}, 1e-6), b.rms_norm("z", x, b.parameter("w", {64}), 1e-6)});
  ASSERT_TRUE(program) << program.error().message;
  EXPECT_THAT(print(*program), HasSubstr("%y: f32 [batch, tokens, 64] = rms_norm(%x, eps 1e-06)"));
  EXPECT_THAT(print(*program), HasSubstr("%z: f32 [batch, tokens, 64] = rms_norm(%x, %w, eps 1e-06)"));
  for (auto* inputs : {&program->ops[0].inputs, &program->ops[1].inputs}) {
    const auto before = *inputs;
    inputs->clear();
    EXPECT_THAT(verify(*program).error().message, HasSubstr("has 0 operands; it must have 1 to 2"));
    *inputs = {before[0], before[0], before[0]};
    EXPECT_THAT(verify(*program).error().message, HasSubstr("has 3 operands; it must have 1 to 2"));
    *inputs = before;
  }
}

TEST(RegionVerify, RefusesWrongViews) {
  const auto refused = [](auto build) {
    Builder b("block", ElementType::kF32);
    const Ref x = b.activation("x", {kBatch, kTokens, 64});
    return !b.finish({b.silu("z", build(b, x))});
  };
  EXPECT_FALSE(refused([](Builder& b, Ref x) { return b.reshape("y", x, {kBatch, kTokens, 2, 32}); }));
  EXPECT_TRUE(refused([](Builder& b, Ref x) { return b.reshape("y", x, {kBatch, kTokens, 2, 31}); }));
  EXPECT_FALSE(refused([](Builder& b, Ref x) { return b.slice("y", x, 2, 32, 32); }));
  EXPECT_TRUE(refused([](Builder& b, Ref x) { return b.slice("y", x, 2, 33, 32); }));
  EXPECT_TRUE(refused([](Builder& b, Ref x) { return b.slice("y", x, 1, 0, Dim::symbol("other")); }));
  EXPECT_TRUE(refused([](Builder& b, Ref x) { return b.slice("y", x, 3, 0, 1); }));
  EXPECT_FALSE(refused([](Builder& b, Ref x) { return b.permute("y", x, {1, 0, 2}); }));
  EXPECT_TRUE(refused([](Builder& b, Ref x) { return b.permute("y", x, {1, 1, 2}); }));
  EXPECT_FALSE(refused([](Builder& b, Ref x) { return b.join("y", 1, {x, x}); }));
  EXPECT_TRUE(refused([](Builder& b, Ref x) { return b.join("y", 1, {x}); }));
  EXPECT_TRUE(refused([](Builder& b, Ref x) { return b.join("y", 1, {x, b.activation("w", {kBatch, kTokens, 32})}); }));
  // A row op unrolls over its last axis, which therefore cannot be a symbol.
  EXPECT_TRUE(refused([](Builder& b, Ref x) { return b.permute("y", x, {0, 2, 1}); }));
}

TEST(RegionVerify, RefusesProgramsThatWereTamperedWith) {
  const Program good = every_block(ElementType::kF32)[1];
  Program twice = good;
  twice.values[1].name = twice.values[0].name;
  EXPECT_THAT(verify(twice).error().message, HasSubstr("used twice"));
  Program early = good;
  std::swap(early.ops.front(), early.ops.back());
  EXPECT_THAT(verify(early).error().message, HasSubstr("computed later or never"));
  Program shape = good;
  shape.values[static_cast<std::size_t>(shape.ops.back().output)].shape.back() = 7;
  EXPECT_THAT(verify(shape).error().message,
              HasSubstr("[flux.single] after = gate_residual: is declared f32 [batch, tokens, 7]; it must be"));
  Program none = good;
  none.outputs.clear();
  EXPECT_THAT(verify(none).error().message, HasSubstr("has no outputs"));
}

}  // namespace
}  // namespace ditfleet::region
