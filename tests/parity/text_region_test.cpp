// The text encoders' layers as regions against eager and a wide reference, and attention with masks.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <random>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/nn/text/layer_programs.h"
#include "pipeline/region/compile/cpu_jit.h"
#include "pipeline/region/ir/builder.h"
#include "pipeline/region/run/interpreter.h"
#include "pipeline/region/run/region.h"
#include "tests/parity/region_inputs.h"

namespace ditfleet::region {
namespace {

using testing::converted;
using ::testing::HasSubstr;
using testing::random_inputs;
using testing::relative_error;
using Outputs = std::vector<at::Tensor>;
using c10::ScalarType;

class TextRegion : public ::testing::Test {
 protected:
  void SetUp() override {
    if (auto compiler = open_cpu_jit(); !compiler) GTEST_SKIP() << compiler.error().message;
  }
  static std::shared_ptr<RegionHost> host(CompileOptions options = {}) {
    options.backend = "cpu_jit";
    return make_region_host(options, c10::Device(c10::DeviceType::CPU), nullptr);
  }
  c10::InferenceMode inference_{true};
};

using Make = Result<Program> (*)(const TextLayerShape&);

void expect_parity(Make make, const TextLayerShape& like) {
  std::mt19937_64 random(20261121);
  for (ElementType type : {ElementType::kF32, ElementType::kBF16}) {
    const auto recipe = [&](ElementType t) {
      TextLayerShape shape = like;
      shape.type = t;
      return make(shape);
    };
    const auto host = make_region_host({.backend = "cpu_jit", .fullgraph = true, .error_on_recompile = true},
                                       c10::Device(c10::DeviceType::CPU), nullptr);
    Region region("text", recipe, host);
    const Program program = recipe(type).value();
    for (int round = 0; round < 6; ++round) {
      const auto tokens = std::uniform_int_distribution<std::int64_t>(1, 40)(random),
                 batch = std::uniform_int_distribution<std::int64_t>(1, 3)(random);
      const auto inputs = random_inputs(program, {{"batch", batch}, {"tokens", tokens}}, random(),
                                        {.strided = round % 2 == 1, .outliers = round % 3 == 2});
      Outputs got;
      region.run(inputs, got);
      const auto eager = interpret(program, inputs),
                 reference = interpret(program, converted(inputs, ScalarType::Double));
      const double mine = relative_error(got[0], reference[0]), theirs = relative_error(eager[0], reference[0]);
      const std::string where = program.block + " " + std::string(name_of(type)) + " tokens " + std::to_string(tokens) +
                                " batch " + std::to_string(batch);
      if (type == ElementType::kBF16)
        EXPECT_LE(mine, 1.1 * theirs) << where;
      else
        EXPECT_LE(mine, 2e-6) << where;
    }
    EXPECT_EQ(host->counters->counts().compiles, 1u);
    EXPECT_EQ(host->counters->counts().fallbacks, 0u);
  }
}

TEST_F(TextRegion, T5ErrsNoMoreThanEager) {
  expect_parity(t5_layer, {.width = 48, .heads = 3, .head_dim = 10, .inner = 100, .gated = true});
  expect_parity(t5_layer, {.width = 30, .heads = 2, .head_dim = 16, .inner = 64, .activation = OpCode::kSilu});
}

TEST_F(TextRegion, ClipErrsNoMoreThanEager) {
  expect_parity(clip_layer,
                {.width = 48, .heads = 4, .head_dim = 12, .inner = 192, .eps = 1e-5, .activation = OpCode::kQuickGelu});
  expect_parity(clip_layer, {.width = 30, .heads = 3, .head_dim = 10, .inner = 66, .eps = 1e-5});
}

// --- diffusers' compile checks by mask --------------------------------------------------------------------------

// Attention alone, with a mask that is added to the scores, or without one.
Result<Program> attending(ElementType type, bool masked) {
  Builder b("attending", type);
  const Dim batch = Dim::symbol("batch"), tokens = Dim::symbol("tokens");
  const auto part = [&](const char* name) { return b.activation(name, {batch, tokens, 2, 16}); };
  const auto q = part("q"), k = part("k"), v = part("v");
  const auto mask = masked ? b.table("mask", type, {batch, 1, tokens, tokens}) : Builder::Ref{};
  return b.finish({b.silu("out", b.attention("attended", q, k, v, {.bias = mask}))});
}

class Masks : public TextRegion {
 protected:
  void SetUp() override {
    TextRegion::SetUp();
    if (IsSkipped()) return;
    const Program program = attending(ElementType::kF32, false).value();
    inputs_ = random_inputs(program, {{"batch", 2}, {"tokens", kTokens}}, 3);
    Region plain(
        "attending", [](ElementType t) { return attending(t, false); }, shared_);
    plain.run(inputs_, without_);
  }
  at::Tensor with(const at::Tensor& mask) {
    Region region(
        "attending", [](ElementType t) { return attending(t, true); }, shared_);
    auto inputs = inputs_;
    inputs.push_back(mask);
    Outputs got, again;
    region.run(inputs, got);
    region.run(inputs, again);
    EXPECT_TRUE(got[0].equal(again[0]));
    EXPECT_EQ(shared_->counters->counts().recompiles, 0u);
    EXPECT_EQ(shared_->counters->counts().fallbacks, 0u);
    return got[0];
  }
  static constexpr std::int64_t kTokens = 9, kReal = 6;
  const std::shared_ptr<RegionHost> shared_ = host({.fullgraph = true, .error_on_recompile = true});
  std::vector<at::Tensor> inputs_;
  Outputs without_;
};

TEST_F(Masks, NoneIsEager) {
  EXPECT_LE(relative_error(without_[0], interpret(attending(ElementType::kF32, false).value(), inputs_)[0]), 2e-6);
}

TEST_F(Masks, AllOnesIsNone) {
  EXPECT_LE(relative_error(with(at::zeros({2, 1, kTokens, kTokens})), without_[0]), 2e-6);
}

// Tokens behind a mask are as if they were not there.
TEST_F(Masks, PaddedIsTheUnpadded) {
  at::Tensor mask = at::zeros({2, 1, kTokens, kTokens});
  mask.slice(3, kReal).fill_(-std::numeric_limits<float>::infinity());
  std::vector<at::Tensor> shorter;
  for (const at::Tensor& t : inputs_) shorter.push_back(t.slice(1, 0, kReal));
  const at::Tensor reference = interpret(attending(ElementType::kF32, false).value(), shorter)[0];
  EXPECT_LE(relative_error(with(mask).slice(1, 0, kReal), reference), 2e-6);
  EXPECT_GT(relative_error(without_[0].slice(1, 0, kReal), reference), 1e-3)
      << "without the mask the padding is attended to";
}

TEST_F(Masks, OneThatTheBlockMakesIsLeftToEager) {
  Builder b("made", ElementType::kF32);
  const Dim tokens = Dim::symbol("tokens");
  const auto x = b.activation("x", {1, tokens, 2, 16});
  const auto mask = b.reshape("mask", b.silu("made", b.activation("m", {1, 1, tokens, 4})), {1, 1, tokens, 4});
  const auto keys = b.activation("k", {1, 4, 2, 16});
  const auto program = b.finish({b.attention("attended", x, keys, keys, {.bias = b.mul("raw", mask, mask)})});
  ASSERT_TRUE(program) << program.error().message;
  EXPECT_THAT(fuse(*program).error().message,
              HasSubstr("[made] attended = attention: the bias %raw is computed in the block"));
}

}  // namespace
}  // namespace ditfleet::region
