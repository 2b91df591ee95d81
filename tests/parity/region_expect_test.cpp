// What a region announces to the attention library is what its calls then ask for.
#include <algorithm>
#include <set>

#include "pipeline/region/libraries/direct_attention.h"
#include "tests/parity/region_fixture.h"

namespace ditfleet::region {
namespace {

// Keeps what it is told and asked, and leaves every attention to LibTorch.
class Recorder : public DirectAttention {
 public:
  bool run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
           double) const override {
    asked.insert(attention_shape(q, k, v, out));
    return false;
  }
  void expect(const AttentionShape& shape) const override { expected.insert(shape); }
  mutable std::set<AttentionShape> asked, expected;
};

// A picture's request is announced by the plain blocks' sizes, whatever its adapters: on a GPU one shape for all
// blocks. On a CPU some blocks' attention is no such call.
TEST_F(RegionParity, WhatIsExpectedIsAskedFor) {
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
        region.expect(ElementType::kBF16, device(), sizes);  // nothing is compiled yet: nothing is known
        region.prepare(ElementType::kBF16, device());
        region.expect(ElementType::kBF16, device(), sizes);
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

}  // namespace
}  // namespace ditfleet::region
