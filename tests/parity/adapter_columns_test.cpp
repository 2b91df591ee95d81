// Adapters beside weights whose groups of rows have columns apart: what stands there computes what the terms say, after
// any others were there.
#include "pipeline/families/flux/adapter_columns.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <random>

#include "tests/parity/region_fixture.h"

namespace ditfleet::pipeline {
namespace {

using c10::ScalarType;

constexpr std::int64_t kHeight = 8, kIn = 24, kRoom = 3 * 32;

LowRank term(std::int64_t first_row, std::int64_t rows, std::int64_t rank, double scale) {
  const auto options = at::TensorOptions(ScalarType::Float);
  return {at::randn({rank, kIn}, options), at::randn({rows, rank}, options), first_row, scale};
}

class RegionParityColumns : public ::testing::Test {
 protected:
  RegionParityColumns() {
    slot_ = slot_with_room(3 * kHeight, kIn, {kRoom, false, 3}, at::TensorOptions(ScalarType::Float));
    slot_.weight.copy_(at::randn({3 * kHeight, kIn}));
    columns_ = std::make_unique<AdapterColumns>(
        std::vector{slot_}, 1,
        region::make_matrix_copies(*region::make_region_host({}, c10::Device(c10::DeviceType::CPU), nullptr)), true);
  }
  // The columns that samples with these terms get in all; checks what they compute.
  std::int64_t check(const std::vector<std::vector<LowRank>>& terms) {
    AdapterColumns::Samples samples;
    for (const auto& one : terms) samples.push_back(&one);
    const auto layout = columns_->plan({samples});
    columns_->load(layout);
    columns_->join();
    const auto& operands = layout.operands.front();
    const std::int64_t apart = operands.apart.size(1);
    EXPECT_TRUE(apart == 0 || operands.adapter.size(1) == 0);
    for (std::size_t s = 0; s < terms.size(); ++s) {
      const at::Tensor x = at::randn({5, kIn});
      at::Tensor expected = x.mm(slot_.weight.t());
      for (const LowRank& one : terms[s])
        expected.narrow(1, one.first_row, one.up.size(0)) += one.scale * x.mm(one.down.t()).mm(one.up.t());
      const auto low = [&](const at::Tensor& a) {
        return x.mm(a[std::min(static_cast<std::int64_t>(s), a.size(0) - 1)].t());
      };  // no columns: one for all samples
      const at::Tensor got = at::cat({x, low(operands.adapter), low(operands.apart)}, 1).mm(operands.weight.t());
      EXPECT_LE(region::testing::relative_error(got, expected), 2e-6);
    }
    for (std::int64_t g = 0; g < 3 && apart > 0; ++g)
      for (std::int64_t other = 0; other < 3; ++other)
        if (other != g) {
          // Those that any sample's A is not zeros for.
          const at::Tensor a = operands.apart.narrow(1, other * apart / 3, apart / 3).abs().sum(at::IntArrayRef{0, 2});
          const at::Tensor b =
              operands.weight.narrow(0, g * kHeight, kHeight).narrow(1, kIn + other * apart / 3, apart / 3);
          EXPECT_EQ((b * (a > 0)).abs().max().item<float>(), 0) << g << " " << other;
        }
    return operands.columns();
  }

  const c10::InferenceMode inference_{true};
  LinearSlot slot_;
  std::unique_ptr<AdapterColumns> columns_;
};

TEST_F(RegionParityColumns, StandApartWhereEachChangesOneGroup) {
  EXPECT_EQ(check({{term(0, 8, 16, 1), term(8, 8, 12, 0.5), term(16, 8, 3, -1)}}), 48);
  EXPECT_EQ(check({{term(0, 8, 4, 1), term(8, 8, 4, 1), term(16, 8, 4, 1)}}), 16)
      << "together they have as few columns as one group";
  EXPECT_EQ(check({{term(0, 8, 20, 1), term(16, 8, 20, 1)}}), 96) << "each group has as many as the one with most";
  EXPECT_EQ(check({{term(0, 24, 20, 1)}}), 32) << "one that changes all groups stands beside all";
  EXPECT_EQ(check({{term(0, 8, 20, 1), term(6, 4, 2, 1)}}), 32) << "so does one that changes parts of two";
  EXPECT_EQ(check({{term(0, 8, 33, 1)}}), 48) << "with no room apart they stand together";
  EXPECT_EQ(check({{}}), 0);
}

TEST_F(RegionParityColumns, NothingIsLeftOfThoseBefore) {
  std::mt19937_64 random(20261123);
  const auto between = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  for (int round = 0; round < 60; ++round) {
    std::vector<std::vector<LowRank>> samples(static_cast<std::size_t>(between(1, 3)));
    std::int64_t room = kRoom;
    for (auto& sample : samples)
      for (std::int64_t n = between(0, 4); n > 0 && room > 0; --n) {
        const std::int64_t rank = std::min(room, between(1, 24)), group = between(0, 2);
        const bool whole = between(0, 5) == 0;
        room -= rank;
        sample.push_back(term(whole ? 0 : group * kHeight, whole ? 3 * kHeight : kHeight, rank,
                              0.25 * static_cast<double>(between(-4, 4))));
      }
    check(samples);
  }
}

}  // namespace
}  // namespace ditfleet::pipeline
