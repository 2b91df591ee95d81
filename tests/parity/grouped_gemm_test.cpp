// Products that leave out columns of zeros, on a Hopper GPU: against the whole product, at sizes that end within tiles and groups.
#include "pipeline/region/run/grouped_gemm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>

#include <limits>

#include "tests/parity/region_fixture.h"

namespace ditfleet::region {
namespace {

using c10::ScalarType;

struct Shape {
  std::int64_t rows, out, shared, each;
  int groups;
  bool bias;
};

class RegionParityGroupedGemm : public ::testing::Test {
 protected:
  void SetUp() override {
    if (device().is_cpu()) GTEST_SKIP() << "needs a GPU";
    host_ = host();
    gemm_ = make_grouped_gemm(*host_);
    if (!gemm_) GTEST_SKIP() << "needs a Hopper GPU, and this is " << host_->arch;
  }
  static at::Tensor randn(std::int64_t rows, std::int64_t columns) {
    return at::randn({rows, columns}, at::TensorOptions(ScalarType::BFloat16).device(device()));
  }
  // x and the weight in wider matrices; nothing outside of what belongs to the product is a number.
  struct Case {
    at::Tensor x, weight, bias, out;
  };
  static Case make(const Shape& s) {
    const std::int64_t in = s.shared + s.groups * s.each;
    const auto within = [](std::int64_t rows, std::int64_t columns) {
      const at::Tensor all = at::full({rows, columns + 64}, std::numeric_limits<double>::quiet_NaN(), at::TensorOptions(ScalarType::BFloat16).device(device()));
      return all.narrow(1, 8, columns);
    };
    Case made{within(s.rows, in), within(s.out, in), s.bias ? randn(1, s.out)[0] : at::Tensor(), within(s.rows, s.out)};
    made.x.copy_(randn(s.rows, in));
    made.weight.narrow(1, 0, s.shared).copy_(randn(s.out, s.shared));
    for (int g = 0; g < s.groups; ++g) {
      const std::int64_t run = s.out / s.groups;
      made.weight.narrow(1, s.shared, s.groups * s.each).narrow(0, g * run, run).zero_().narrow(1, g * s.each, s.each).copy_(randn(run, s.each));
    }
    return made;
  }
  bool run(const Shape& s, const Case& c) const {
    return gemm_->run(s.rows, c.x.size(1), s.out, s.groups, s.groups * s.each, c.x.stride(0), c.weight.stride(0), c.out.stride(0),
                      {c.x.const_data_ptr(), c.weight.const_data_ptr(), c.bias.defined() ? c.bias.const_data_ptr() : nullptr, c.out.mutable_data_ptr()});
  }

  const c10::InferenceMode inference_{true};
  std::shared_ptr<RegionHost> host_;
  std::shared_ptr<const GroupedGemm> gemm_;
};

TEST_F(RegionParityGroupedGemm, ComputesTheProduct) {
  for (const Shape& s : {Shape{4224, 1152, 256, 64, 3, true}, Shape{4200, 1152, 256, 64, 3, true}, Shape{4161, 1152, 64, 128, 3, false}, Shape{4224, 1160, 320, 64, 2, true},
                         Shape{4097, 1096, 512, 192, 4, true}, Shape{8448, 576, 128, 64, 3, true}, Shape{4608, 9216, 3072, 64, 3, true}}) {
    const Case c = make(s);
    const std::string what = std::to_string(s.rows) + " x " + std::to_string(s.out) + " x " + std::to_string(s.shared) + " + " + std::to_string(s.groups) + " x " + std::to_string(s.each);
    ASSERT_TRUE(run(s, c)) << what;
    const std::optional<at::Tensor> bias = c.bias.defined() ? std::optional(c.bias) : std::nullopt;
    const at::Tensor expected = at::linear(c.x.to(ScalarType::Float), c.weight.to(ScalarType::Float), bias ? std::optional(bias->to(ScalarType::Float)) : std::nullopt);
    const at::Tensor theirs = at::linear(c.x, c.weight, bias);
    const double mine = testing::relative_error(c.out, expected), library = testing::relative_error(theirs, expected);
    EXPECT_LE(mine, 1.01 * library) << what;
    // Nothing beside the result has been written.
    const at::Tensor all = c.out.as_strided({s.rows, c.out.stride(0)}, {c.out.stride(0), 1}, 0);
    EXPECT_EQ(all.isnan().sum().item<std::int64_t>(), s.rows * 64) << what;
  }
}

// Columns of other groups are not read at all.
TEST_F(RegionParityGroupedGemm, LeavesOutTheColumnsOfOthers) {
  const Shape s{4224, 1152, 256, 64, 3, true};
  const Case c = make(s);
  ASSERT_TRUE(run(s, c));
  const at::Tensor before = c.out.clone();
  for (int g = 0; g < s.groups; ++g)
    for (int other = 0; other < s.groups; ++other)
      if (other != g) c.weight.narrow(0, g * 384, 384).narrow(1, s.shared + other * s.each, s.each).fill_(std::numeric_limits<double>::quiet_NaN());
  ASSERT_TRUE(run(s, c));
  EXPECT_TRUE(c.out.equal(before));
}

TEST_F(RegionParityGroupedGemm, LeavesToTheLibraryWhatItDoesNotDoBetter) {
  for (const Shape& s : {Shape{512, 9216, 3072, 64, 3, true}, Shape{4224, 1152, 256, 32, 3, true}, Shape{4224, 1152, 240, 64, 3, true}, Shape{1, 1152, 256, 64, 3, true}}) {
    const Case c = make(s);
    EXPECT_FALSE(run(s, c)) << s.rows << " x " << s.shared << " + " << s.each;
  }
  const Shape s{4224, 1152, 256, 64, 3, true};
  Case odd = make(s);
  odd.out = at::full({s.rows, s.out + 3}, 0, odd.out.options()).narrow(1, 0, s.out);
  EXPECT_FALSE(run(s, odd));
}

}  // namespace
}  // namespace ditfleet::region
