// The host's kernels, run: what they round is rounded to nearest, ties to even, whatever the width.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "pipeline/region/compile/cpu_jit.h"
#include "pipeline/region/compile/host_module.h"
#include "pipeline/region/ir/builder.h"

namespace ditfleet::region {
namespace {

using Bits = std::uint16_t;  // of a bf16

float wide(Bits v) { return std::bit_cast<float>(std::uint32_t{v} << 16); }

Bits nearest(float v) {
  if (std::isnan(v)) return 0x7fc0;
  const auto u = std::bit_cast<std::uint32_t>(v);
  const std::uint32_t half = u & 0xffff, up = half > 0x8000 || (half == 0x8000 && (u & 0x10000)) ? 1 : 0;
  return static_cast<Bits>((u >> 16) + up);
}

bool same(Bits got, Bits expected) { return std::isnan(wide(expected)) ? std::isnan(wide(got)) : got == expected; }

class RegionRounding : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    if (auto opened = open_cpu_jit(); !opened) GTEST_SKIP() << opened.error().message;
  }
  static std::int64_t width() { return GetParam(); }

  // The one kernel of a program, on rows that lie one behind another.
  template <class... Operands>
  static void run(const Result<Program>& program, std::int64_t rows, Operands*... operands) {
    const auto compiler = *open_cpu_jit();
    const Plan plan = *fuse(*program, compiler->fuse_options());
    ASSERT_EQ(plan.kernels.size(), 1u);
    const auto compiled = compiler->compile("rounding", generate_cpp(plan), kHostArch);
    ASSERT_TRUE(compiled) << compiled.error().message;
    const auto module = HostModule::load(*compiled);
    ASSERT_TRUE(module) << module.error().message;
    std::vector<long long> instance{1, 1, 1, rows};
    for (const void* operand : {static_cast<const void*>(operands)...})
      instance.insert(instance.end(), {reinterpret_cast<long long>(operand), 0, 0, 0, static_cast<long long>(width())});
    (*module)->kernel(0)(instance.data(), 0, rows);
  }
  static Shape shape() { return {Dim::symbol("rows"), width()}; }
};

TEST_P(RegionRounding, CastsEveryFloatToItsNearest) {
  constexpr std::int64_t kRows = 400;
  std::vector<float> x;
  for (const std::uint32_t bits :
       {0x00000000u, 0x80000000u, 0x3f808000u, 0x3f818000u, 0x3f808001u, 0x3f807fffu, 0x7f7fffffu,
        0x7f7f7fffu, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu,
        0x7fff8000u, 0x7f800001u, 0xff80ffffu, 0x00000001u, 0x00008000u, 0x00018000u, 0x807fffffu})
    x.push_back(std::bit_cast<float>(bits));
  std::mt19937 random(1);
  while (static_cast<std::int64_t>(x.size()) < kRows * width())
    x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  std::vector<Bits> y(x.size(), 0x1234);
  Builder b("cast", ElementType::kF32);
  run(b.finish({b.cast("y", b.activation("x", shape()), ElementType::kBF16)}), kRows, x.data(), y.data());
  for (std::size_t i = 0; i < x.size(); ++i)
    ASSERT_TRUE(same(y[i], nearest(x[i]))) << std::hex << std::bit_cast<std::uint32_t>(x[i]) << " became " << y[i];
}

// Each operator's result is rounded, also those that stay in the kernel; infinities and what is no number go through.
TEST_P(RegionRounding, RoundsEachResultOfAChain) {
  constexpr std::int64_t kRows = 400;
  std::mt19937 random(2);
  std::vector<Bits> x, branch, gate;
  for (std::int64_t i = 0; i < kRows * width(); ++i)
    for (auto* values : {&x, &branch, &gate}) values->push_back(static_cast<Bits>(random()));
  std::vector<Bits> y(x.size(), 0x1234);
  Builder b("residual", ElementType::kBF16);
  const auto base = b.activation("x", shape());
  run(b.finish({b.gate_residual("y", base, b.activation("gate", shape()), b.activation("branch", shape()))}), kRows,
      x.data(), gate.data(), branch.data(), y.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const Bits expected = nearest(wide(x[i]) + wide(nearest(wide(gate[i]) * wide(branch[i]))));
    ASSERT_TRUE(same(y[i], expected)) << std::hex << x[i] << " + " << gate[i] << " * " << branch[i] << " became "
                                      << y[i] << ", not " << expected;
  }
}

// Neighbours go through one 32-bit word where the width is even.
INSTANTIATE_TEST_SUITE_P(Widths, RegionRounding, ::testing::Values(64, 34, 33, 2, 1));

}  // namespace
}  // namespace ditfleet::region
