// Compiled regions at the ends: numbers that are none, infinite or too small to be normal, sizes of nothing and of one.
#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "pipeline/region/ir/builder.h"
#include "pipeline/region/run/interpreter.h"
#include "tests/parity/region_fixture.h"
#include "tests/unit/pipeline/region/region_temporal_block.h"

namespace ditfleet::region {
namespace {

using testing::relative_error;

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

TEST_F(RegionParity, ActivationsEndAsEagersDo) {
  const std::vector<float> ends{kNan,    kInfinity, -kInfinity, 3e38f,  -3e38f,  1e19f,  -1e19f, 104.0f,
                                -104.0f, 88.8f,     -88.8f,     1e-40f, -1e-40f, 1e-45f, 0.0f,   -0.0f};
  const auto width = static_cast<std::int64_t>(ends.size());
  using Activation = Builder::Ref (Builder::*)(const std::string&, Builder::Ref);
  for (const auto& [name, activation] :
       {std::pair<const char*, Activation>{"gelu_tanh", &Builder::gelu_tanh}, {"silu", &Builder::silu}})
    for (ElementType type : {ElementType::kF32, ElementType::kBF16}) {
      const Region::Recipe bent = [width, activation = activation](ElementType t) {
        Builder b("bent", t);
        return b.finish({(b.*activation)("y", b.activation("x", {Dim::symbol("rows"), width}))});
      };
      Region region("bent", bent, host({.fullgraph = true}));
      std::vector<float> values = ends;
      at::Tensor x = at::from_blob(values.data(), {1, width}).clone().to(device());
      if (type == ElementType::kBF16) x = x.to(c10::ScalarType::BFloat16);
      Outputs got;
      region.run({x}, got);
      const at::Tensor mine = got[0].cpu().to(c10::ScalarType::Float),
                       eager = interpret(*bent(type), {x})[0].cpu().to(c10::ScalarType::Float);
      for (std::size_t i = 0; i < ends.size(); ++i) {
        const float a = mine.const_data_ptr<float>()[i], b = eager.const_data_ptr<float>()[i];
        EXPECT_TRUE(a == b || (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= 1e-30f)
            << name << " of " << ends[i] << " in " << name_of(type) << ": " << a << ", eager " << b;
      }
    }
}

// A token that is no number spoils what it reaches, as eager's does: it is not hidden, and nothing else is spoilt.
TEST_F(RegionParity, BadTokensSpreadAsEagersDo) {
  Region region("single", recipe(flux_single_block, 2, 16), host({.fullgraph = true}));
  const Program program = program_of(flux_single_block, 2, 16, ElementType::kF32);
  for (const float bad : {kNan, kInfinity, 3e38f, 1e-40f, 0.0f}) {
    auto inputs = inputs_for(program, {{"batch", 2}, {"tokens", 7}}, 5);
    inputs[0].select(0, 1).select(0, 2).fill_(bad);
    Outputs got;
    region.run(inputs, got);
    const at::Tensor mine = got[0], eager = interpret(program, inputs)[0];
    EXPECT_TRUE(mine.isnan().equal(eager.isnan())) << bad;
    EXPECT_LE(relative_error(mine.select(0, 0), eager.select(0, 0)), 2e-6) << bad;
  }
}

TEST_F(RegionParity, SizesMayBeNothingOrOne) {
  const auto shared = host({.fullgraph = true});
  for (const auto& [make, first, second] : {std::tuple{&flux_double_block, "image", "text"},
                                            {&flux_single_block, "tokens", "tokens"},
                                            {&temporal_block, "frames", "places"}}) {
    Region region("few", recipe(make, 2, 16), shared);
    const Program program = program_of(make, 2, 16, ElementType::kF32);
    for (const auto& [batch, some, others] : {std::tuple{1, 1, 1}, {1, 0, 3}, {1, 3, 0}, {0, 3, 3}, {0, 0, 0}}) {
      const auto inputs = inputs_for(program, {{"batch", batch}, {first, some}, {second, others}}, 5);
      Outputs got;
      region.run(inputs, got);
      const auto eager = interpret(program, inputs);
      ASSERT_EQ(got.size(), eager.size());
      for (std::size_t o = 0; o < got.size(); ++o) {
        ASSERT_EQ(got[o].sizes(), eager[o].sizes()) << program.block;
        if (got[o].numel() == 0) continue;
        EXPECT_LE(relative_error(got[o], eager[o]), 2e-6)
            << program.block << " " << batch << " " << some << " " << others;
      }
    }
  }
  EXPECT_EQ(shared->counters->counts().recompiles, 0u);
}

}  // namespace
}  // namespace ditfleet::region
