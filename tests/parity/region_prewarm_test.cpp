// What regions ask of the attention library: the shapes that they prewarmed, and keys of another length without a copy.
#include <algorithm>
#include <set>

#include "pipeline/region/ir/builder.h"
#include "pipeline/region/libraries/direct_attention.h"
#include "pipeline/region/run/interpreter.h"
#include "tests/parity/region_fixture.h"

namespace ditfleet::region {
namespace {

// Records shapes, and leaves every attention to LibTorch.
class Recorder : public DirectAttention {
 public:
  std::string name() const override { return "recorder"; }
  bool run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
           const at::Tensor&) const override {
    asked.insert(attention_shape(q, k, v, out));
    return false;
  }
  void prewarm(const AttentionShape& shape) const override { expected.insert(shape); }
  mutable std::set<AttentionShape> asked, expected;
};

// On a GPU the plain blocks' sizes prewarm the one shape that all blocks use, with and without adapters. On a CPU some
// blocks use other shapes.
TEST_F(RegionParity, CallsUseThePrewarmedShape) {
  struct Case {
    Make make;
    Sizes sizes;
  };
  const Case cases[] = {{flux_double_block, {{"batch", 2}, {"text", 7}, {"image", 24}}},
                        {flux_single_block, {{"batch", 2}, {"tokens", 31}}}};
  const auto shared = host();
  const auto recorder = std::make_shared<const Recorder>();
  shared->direct_attention = recorder;
  for (const auto& [make, sizes] : cases)
    for (const bool adapters : {false, true}) {
      const auto recipe = [make = make, adapters](ElementType type) {
        return make({.heads = 3, .head_dim = 16, .type = type, .adapters = adapters});
      };
      Region region("block", recipe, shared);
      if (!adapters) {
        region.prewarm(ElementType::kBF16, device(), sizes);  // not compiled yet: does nothing
        region.prepare(ElementType::kBF16, device());
        region.prewarm(ElementType::kBF16, device(), sizes);
      }
      const Program program = recipe(ElementType::kBF16).value();
      Sizes all = sizes;
      for (const auto& symbol : program.symbols())
        if (symbol.ends_with(".rank")) all[symbol] = 16;
      Outputs got;
      region.run(inputs_for(program, all, 1), got);
    }
  EXPECT_EQ(recorder->expected.size(), 1u);
  if (device().is_cpu())
    EXPECT_TRUE(std::includes(recorder->asked.begin(), recorder->asked.end(), recorder->expected.begin(),
                              recorder->expected.end()));
  else
    EXPECT_EQ(recorder->asked, recorder->expected);
}

// Queries of one sequence attend to keys and values of another, which one product made side by side.
Result<Program> cross_attention(ElementType type) {
  constexpr std::int64_t kHeads = 3, kHeadDim = 16, kWidth = kHeads * kHeadDim;
  Builder b("cross", type);
  const Dim batch = Dim::symbol("batch"), tokens = Dim::symbol("tokens"), text = Dim::symbol("text");
  const auto x = b.activation("x", {batch, tokens, kWidth}), context = b.activation("context", {batch, text, kWidth});
  const auto q_slots = b.linear_slots("q", kWidth, kWidth), kv_slots = b.linear_slots("kv", kWidth, 2 * kWidth);
  const auto norm = b.parameter("norm", {kHeadDim});
  const auto heads = [&](const std::string& name, Builder::Ref of, std::int64_t part, const Dim& length) {
    return b.reshape(name, b.slice(name + ".flat", of, 2, part * kWidth, kWidth), {batch, length, kHeads, kHeadDim});
  };
  const auto q = b.rms_norm("q.normed", heads("q_in", b.linear("q_out", x, q_slots), 0, tokens), norm, 1e-6);
  const auto kv = b.linear("kv_out", context, kv_slots);
  const auto attended = b.attention("attended", q, heads("k", kv, 0, text), heads("v", kv, 1, text));
  return b.finish({b.silu("out", b.reshape("attended.flat", attended, {batch, tokens, kWidth}))});
}

TEST_F(RegionParity, KeysOfAnotherLengthAreReadInPlace) {
  const auto shared = host({.fullgraph = true});
  const auto recorder = std::make_shared<const Recorder>();
  shared->direct_attention = recorder;
  Region region("cross", cross_attention, shared);
  for (const auto& [tokens, text] : {std::pair(24, 7), std::pair(5, 40)}) {
    const Sizes sizes{{"batch", 2}, {"tokens", tokens}, {"text", text}};
    for (const ElementType type : {ElementType::kF32, ElementType::kBF16}) {
      const Program program = cross_attention(type).value();
      const auto inputs = inputs_for(program, sizes, 3);
      std::vector<at::Tensor> exact;
      for (const at::Tensor& t : inputs) exact.push_back(t.to(c10::ScalarType::Double));
      Outputs got;
      region.run(inputs, got);
      const auto reference = interpret(program, exact), eager = interpret(program, inputs);
      EXPECT_LE(testing::relative_error(got[0], reference[0]),
                type == ElementType::kBF16 ? 1.1 * testing::relative_error(eager[0], reference[0]) : 2e-6)
          << tokens << " on " << text;
    }
    region.prewarm(ElementType::kBF16, device(), sizes);
    ASSERT_EQ(recorder->asked.size(), 1u);
    const AttentionShape shape = *recorder->asked.begin();
    EXPECT_EQ(shape.tokens, tokens);
    EXPECT_EQ(shape.key_tokens, text);
    EXPECT_EQ(shape.k.token, 2 * 48);
    EXPECT_EQ(shape.v.token, 2 * 48);
    recorder->asked.clear();
  }
}

}  // namespace
}  // namespace ditfleet::region
