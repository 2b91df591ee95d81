// Blocks whose weights are quantized: fp8 products with row scales, weights in other types, adapters beside them.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <random>

#include "pipeline/region/libraries/fp8.h"
#include "pipeline/region/programs/f8_heads.h"
#include "pipeline/region/run/interpreter.h"
#include "tests/parity/region_fixture.h"

namespace ditfleet::region {
namespace {

using c10::ScalarType;
using testing::relative_error;
using Weight = Builder::Weight;

Region::Recipe quantized(Make make, std::int64_t heads, std::int64_t head_dim, bool adapters,
                         const std::vector<Weight>& weights) {
  return [=](ElementType type) {
    return make({.heads = heads, .head_dim = head_dim, .type = type, .adapters = adapters, .weights = weights});
  };
}

// The same block with the values of its fp8 weights, in fp64: what it computes without rounding anything.
std::vector<at::Tensor> exact(Make make, std::int64_t heads, std::int64_t head_dim, bool adapters,
                              std::vector<Weight> weights, const Program& program,
                              const std::vector<at::Tensor>& inputs) {
  for (Weight& weight : weights)
    if (weight != Weight::kOwn) weight = Weight::kApart;
  const Program plain = quantized(make, heads, head_dim, adapters, weights)(ElementType::kF32).value();
  std::map<std::string, at::Tensor> by_name;
  const auto order = program.inputs();
  for (std::size_t i = 0; i < order.size(); ++i) by_name[program.value(order[i]).name] = inputs[i];
  std::vector<at::Tensor> values;
  for (int input : plain.inputs()) {
    const std::string& name = plain.value(input).name;
    at::Tensor t = by_name.at(name).to(ScalarType::Double);
    if (by_name.at(name).scalar_type() == ScalarType::Float8_e4m3fn)
      t = by_name.at(name).to(ScalarType::Float).to(ScalarType::Double) *
          by_name.at(name.substr(0, name.rfind('.')) + ".scale").to(ScalarType::Double).unsqueeze(1);
    values.push_back(t);
  }
  return interpret(plain, values);
}

class RegionParityQuantized : public RegionParity {
 protected:
  void SetUp() override {
    RegionParity::SetUp();
    if (!device().is_cpu() && host()->arch < "sm_89" && host()->arch != "sm_100a" && host()->arch != "sm_120a")
      GTEST_SKIP() << "this GPU has no fp8 products";
  }
};

TEST_F(RegionParityQuantized, BlocksErrNoMoreThanEagerOnes) {
  std::mt19937_64 random(20261124);
  const auto between = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  const std::int64_t heads = 6, head_dim = 32;
  for (const Make make : {flux_double_block, flux_single_block, wan_block_of})
    for (const bool adapters : {false, true})
      for (const ElementType type : {ElementType::kF32, ElementType::kBF16}) {
        if (type == ElementType::kF32 && !device().is_cpu()) continue;  // models on a GPU compute fp8 in bf16
        for (int mix = 0; mix < 2; ++mix) {
          std::vector<Weight> weights(8, Weight::kF8);  // then all kinds beside one another
          if (mix > 0)
            for (Weight& one : weights) one = static_cast<Weight>(between(0, 3));
          const auto recipe = quantized(make, heads, head_dim, adapters, weights);
          const Program program = recipe(type).value();
          Region region("quantized", recipe, host({.fullgraph = true, .error_on_recompile = true}));
          // An activation that differs in its last bit may get another code, so errors are compared on average.
          double mine = 0, theirs = 0;
          for (int round = 0; round < 4; ++round) {
            Sizes sizes{{"batch", between(1, 3)}};
            for (const auto& symbol : program.symbols())
              if (symbol.ends_with(".rank"))
                sizes[symbol] = between(0, 2) * 16;
              else if (symbol != "batch")
                sizes[symbol] = between(1, 60);
            const auto inputs = inputs_for(program, sizes, random(), {.outliers = round % 2 == 1});
            Outputs got;
            region.run(inputs, got);
            const auto eager = interpret(program, inputs);
            const auto reference = exact(make, heads, head_dim, adapters, weights, program, inputs);
            for (std::size_t o = 0; o < got.size(); ++o) {
              mine += relative_error(got[o], reference[o]);
              theirs += relative_error(eager[o], reference[o]);
              EXPECT_LT(relative_error(got[o], reference[o]), 0.2) << program.block << " round " << round;
            }
          }
          EXPECT_LE(mine, 1.1 * theirs + 1e-5) << program.block << " " << name_of(type) << " mix " << mix;
        }
      }
}

// 8-bit attention errs as its operators do: q, k and v have 3 bits of mantissa.
TEST_F(RegionParityQuantized, EightBitAttentionErrsAsItsOperators) {
  for (const Make make : {flux_double_block, flux_single_block, wan_block_of})
    for (const bool adapters : {false, true})
      for (const ElementType type : {ElementType::kF32, ElementType::kBF16}) {
        if (type == ElementType::kF32 && !device().is_cpu()) continue;
        const auto recipe = [=](ElementType of) -> Result<Program> {
          return with_f8_attention(make({.heads = 6, .head_dim = 32, .type = of, .adapters = adapters}).value());
        };
        const Program program = recipe(type).value(),
                      plain = make({.heads = 6, .head_dim = 32, .type = type, .adapters = adapters}).value();
        Region region("narrow", recipe, host({.fullgraph = true}));
        double mine = 0, theirs = 0, without = 0;
        for (const std::int64_t tokens : {40, 300}) {
          Sizes sizes{{"batch", 2}};
          for (const auto& symbol : program.symbols())
            if (symbol != "batch") sizes[symbol] = symbol.ends_with(".rank") ? 16 : tokens;
          const auto inputs = inputs_for(program, sizes, static_cast<std::uint64_t>(tokens));
          Outputs got;
          region.run(inputs, got);
          std::vector<at::Tensor> wide;
          for (const at::Tensor& t : inputs) wide.push_back(t.to(ScalarType::Double));
          const auto eager = interpret(program, inputs), reference = interpret(plain, wide);
          const auto unrounded = interpret(plain, inputs);
          for (std::size_t o = 0; o < got.size(); ++o) {
            mine += relative_error(got[o], reference[o]);
            theirs += relative_error(eager[o], reference[o]);
            without += relative_error(unrounded[o], reference[o]);
            EXPECT_LT(relative_error(got[o], reference[o]), 0.1) << program.block << " " << tokens;
          }
        }
        // A GPU's library also rounds the softmax.
        EXPECT_LE(mine, (device().is_cpu() ? 1.1 : 1.5) * theirs) << program.block << " " << name_of(type);
        if (type == ElementType::kF32) {
          EXPECT_GT(mine, 10 * without) << program.block << ": nothing was rounded";
        }
      }
}

TEST_F(RegionParityQuantized, HeadsOfValuesAreQuantizedApart) {
  const at::Tensor v = at::zeros({2, 5, 3, 8}, at::TensorOptions(ScalarType::BFloat16).device(device()));
  v[1][4][2][7] = -896;
  v[0][0][1].fill_(0.25);
  const auto [codes, scales] = fp8_heads(v);
  EXPECT_EQ(scales.sizes(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(scales[1][2].item<float>(), 2);
  EXPECT_EQ(codes[1][4][2][7].to(ScalarType::Float).item<float>(), -448);
  EXPECT_EQ(codes[0][0][1][3].to(ScalarType::Float).item<float>(), 448);
  EXPECT_EQ(scales[0][0].item<float>(), kLeastRowScale) << "a head of zeros does not divide by zero";
}

// Many blocks a head, few, and less than one; columns of a product's rows; zeros, NaN, infinity, the smallest numbers.
TEST_F(RegionParityQuantized, HeadsAreQuantizedAsTheOperatorsDo) {
  if (device().is_cpu()) GTEST_SKIP() << "the program is for GPUs";
  const auto own = host({.fullgraph = true});
  const F8Heads f8_heads = make_f8_heads(*own);
  const auto magnitude = [](const at::Tensor& t) { return t.view(ScalarType::Byte).bitwise_and(0x7f); };
  for (const auto& [tokens, heads, size] :
       {std::tuple<std::int64_t, std::int64_t, std::int64_t>{4608, 24, 128}, {300, 3, 64}, {1, 2, 8}, {77, 5, 40}}) {
    const at::Tensor all =
        at::randn({2, tokens, 3 * heads * size}, at::TensorOptions(ScalarType::BFloat16).device(device()));
    const at::Tensor v = all.narrow(2, 2 * heads * size, heads * size).view({2, tokens, heads, size});
    for (const double odd : {0., 7e-39, 3e38, HUGE_VAL, std::nan("")}) {
      v[0][tokens / 2][1][size - 1] = odd;
      v[1].select(1, 0).fill_(odd);
      const auto [codes, scales] = f8_heads(v);
      const auto [their_codes, their_scales] = fp8_heads(v);
      EXPECT_TRUE(codes.is_contiguous());
      EXPECT_TRUE(at::allclose(scales, their_scales, 0, 0, /*equal_nan=*/true)) << tokens << " " << odd;
      EXPECT_TRUE(at::equal(magnitude(codes), magnitude(their_codes))) << tokens << " " << odd;
    }
  }
  EXPECT_EQ(own->counters->counts().fallbacks, 0u);
}

// Rows of zeros, rows with one large value, halves between two codes, NaN: the kernels' codes are the operators'.
TEST_F(RegionParityQuantized, RowsAreQuantizedAsTheOperatorsDo) {
  for (const ElementType type : {ElementType::kF32, ElementType::kBF16})
    for (const std::int64_t width : {16, 24, 192, 3072, 15360, 17}) {
      const auto recipe = [width](ElementType t) {
        Builder b("quantize", t);
        const Dim tokens = Dim::symbol("tokens");
        const auto x = b.activation("x", {1, tokens, width});
        const auto scale = b.row_scale("scale", x);
        return b.finish({b.quantize_row("codes", x, scale), scale});
      };
      auto inputs = inputs_for(recipe(type).value(), {{"tokens", 40}}, 7);
      at::Tensor x = inputs[0][0];
      x[1].zero_();
      x[2][3] = 1e4;
      x[3].fill_(1e-38);
      for (std::int64_t i = 0; i < 16; ++i) x[4][i] = (static_cast<double>(i) + 0.5) / 512;
      x[4][0] = 448;
      x[5].fill_(-3e38);
      Outputs got;
      Region("quantize", recipe, host({.fullgraph = true})).run(inputs, got);
      const at::Tensor scales = fp8_row_scales(inputs[0]), codes = fp8_codes(inputs[0], scales);
      EXPECT_TRUE(at::equal(got[1], scales)) << name_of(type) << " " << width;
      EXPECT_TRUE(at::equal(got[0].view(ScalarType::Byte), codes.view(ScalarType::Byte)))
          << name_of(type) << " " << width;
    }
}

}  // namespace
}  // namespace ditfleet::region
