// Adapters in the columns beside a weight that stacks q, k and v compute what their terms say, after any others were
// there.
#include "pipeline/nn/adapter_columns.h"

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
    slot_ = slot_with_lora_columns(3 * kHeight, kIn, {kRoom}, at::TensorOptions(ScalarType::Float));
    slot_.weight.copy_(at::randn({3 * kHeight, kIn}));
    columns_ = std::make_unique<AdapterColumns>(
        std::vector<std::vector<LinearSlot>>{{slot_}},
        region::make_matrix_copies(*region::make_region_host({}, c10::Device(c10::DeviceType::CPU), nullptr)));
  }
  // The number of columns that these terms get; checks what they compute.
  std::int64_t check(const std::vector<LowRank>& terms) {
    const auto layout = columns_->plan({&terms});
    columns_->load(layout);
    columns_->join();
    const auto& operands = layout->operands.front();
    const at::Tensor x = at::randn({5, kIn});
    at::Tensor expected = x.mm(slot_.weight.t());
    for (const LowRank& one : terms)
      expected.narrow(1, one.first_row, one.up.size(0)) += one.scale * x.mm(one.down.t()).mm(one.up.t());
    const at::Tensor got = at::cat({x, x.mm(operands.adapter[0].t())}, 1).mm(operands.weight.t());
    EXPECT_LE(region::testing::relative_error(got, expected), 2e-6);
    // A term's columns hold zeros for the rows that it does not change.
    std::int64_t first = kIn;
    for (const LowRank& one : terms) {
      const at::Tensor columns = operands.weight.narrow(1, first, one.up.size(1));
      const std::int64_t end = one.first_row + one.up.size(0);
      EXPECT_EQ(columns.narrow(0, 0, one.first_row).count_nonzero().item<std::int64_t>(), 0);
      EXPECT_EQ(columns.narrow(0, end, 3 * kHeight - end).count_nonzero().item<std::int64_t>(), 0);
      first += one.up.size(1);
    }
    return operands.adapter.size(1);
  }

  const c10::InferenceMode inference_{true};
  LinearSlot slot_;
  std::unique_ptr<AdapterColumns> columns_;
};

TEST_F(RegionParityColumns, EachTermHasColumnsOfItsOwn) {
  EXPECT_EQ(check({term(0, 8, 16, 1), term(8, 8, 12, 0.5), term(16, 8, 3, -1)}), 32);
  EXPECT_EQ(check({term(0, 8, 4, 1), term(8, 8, 4, 1), term(16, 8, 4, 1)}), 16);
  EXPECT_EQ(check({term(0, 8, 20, 1), term(16, 8, 20, 1)}), 48);
  EXPECT_EQ(check({term(0, 24, 20, 1)}), 32) << "one term may change q, k and v";
  EXPECT_EQ(check({term(0, 8, 20, 1), term(6, 4, 2, 1)}), 32) << "or parts of two";
  EXPECT_EQ(check({term(0, 8, 33, 1)}), 48);
  EXPECT_EQ(check({}), 0);
}

TEST_F(RegionParityColumns, NothingIsLeftOfThoseBefore) {
  std::mt19937_64 random(20261123);
  const auto between = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  for (int round = 0; round < 60; ++round) {
    std::vector<LowRank> terms;
    std::int64_t room = kRoom;
    for (std::int64_t n = between(0, 6); n > 0 && room > 0; --n) {
      const std::int64_t rank = std::min(room, between(1, 24)), group = between(0, 2);
      const bool whole = between(0, 5) == 0;
      room -= rank;
      terms.push_back(term(whole ? 0 : group * kHeight, whole ? 3 * kHeight : kHeight, rank,
                           0.25 * static_cast<double>(between(-4, 4))));
    }
    check(terms);
  }
}

}  // namespace
}  // namespace ditfleet::pipeline
