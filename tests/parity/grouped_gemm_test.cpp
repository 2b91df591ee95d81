// Products that leave out columns of zeros, on a Hopper GPU: against the whole product, at sizes that end within tiles
// and groups.
#include "pipeline/region/programs/grouped_gemm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>

#include <limits>
#include <set>

#include "pipeline/region/run/graphs.h"
#include "pipeline/region/run/interpreter.h"
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
      const at::Tensor all = at::full({rows, columns + 64}, std::numeric_limits<double>::quiet_NaN(),
                                      at::TensorOptions(ScalarType::BFloat16).device(device()));
      return all.narrow(1, 8, columns);
    };
    Case made{within(s.rows, in), within(s.out, in), s.bias ? randn(1, s.out)[0] : at::Tensor(), within(s.rows, s.out)};
    made.x.copy_(randn(s.rows, in));
    made.weight.narrow(1, 0, s.shared).copy_(randn(s.out, s.shared));
    for (int g = 0; g < s.groups; ++g) {
      const std::int64_t run = s.out / s.groups;
      made.weight.narrow(1, s.shared, s.groups * s.each)
          .narrow(0, g * run, run)
          .zero_()
          .narrow(1, g * s.each, s.each)
          .copy_(randn(run, s.each));
    }
    return made;
  }
  static GroupedProduct product(const Shape& s, const Case& c) {
    return {s.rows,        c.x.size(1),        s.out,          s.groups, s.groups * s.each,
            c.x.stride(0), c.weight.stride(0), c.out.stride(0)};
  }
  bool run(const Shape& s, const Case& c) const {
    return gemm_->run(product(s, c), {c.x.const_data_ptr(), c.weight.const_data_ptr(),
                                      c.bias.defined() ? c.bias.const_data_ptr() : nullptr, c.out.mutable_data_ptr()});
  }

  const c10::InferenceMode inference_{true};
  std::shared_ptr<RegionHost> host_;
  std::shared_ptr<const GroupedGemm> gemm_;
};

TEST_F(RegionParityGroupedGemm, ComputesTheProduct) {
  for (const Shape& s :
       {Shape{4224, 1152, 256, 64, 3, true}, Shape{4200, 1152, 256, 64, 3, true}, Shape{4161, 1152, 64, 128, 3, false},
        Shape{4224, 1160, 320, 64, 2, true}, Shape{4097, 1096, 512, 192, 4, true}, Shape{8448, 576, 128, 64, 3, true},
        Shape{1, 1152, 256, 64, 3, true}, Shape{193, 8, 64, 64, 2, true}, Shape{4608, 9216, 3072, 64, 3, true}}) {
    const Case c = make(s);
    const std::string what = std::to_string(s.rows) + " x " + std::to_string(s.out) + " x " + std::to_string(s.shared) +
                             " + " + std::to_string(s.groups) + " x " + std::to_string(s.each);
    ASSERT_TRUE(run(s, c)) << what;
    const std::optional<at::Tensor> bias = c.bias.defined() ? std::optional(c.bias) : std::nullopt;
    const at::Tensor expected = at::linear(c.x.to(ScalarType::Float), c.weight.to(ScalarType::Float),
                                           bias ? std::optional(bias->to(ScalarType::Float)) : std::nullopt);
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
      if (other != g)
        c.weight.narrow(0, g * 384, 384)
            .narrow(1, s.shared + other * s.each, s.each)
            .fill_(std::numeric_limits<double>::quiet_NaN());
  ASSERT_TRUE(run(s, c));
  EXPECT_TRUE(c.out.equal(before));
}

TEST_F(RegionParityGroupedGemm, RefusesOperandsThatLieOtherwise) {
  for (const Shape& s : {Shape{4224, 1152, 256, 32, 3, true}, Shape{4224, 1152, 240, 64, 3, true},
                         Shape{4224, 1150, 256, 64, 3, true}, Shape{4224, 1152, 256, 0, 3, true}}) {
    const Case c = make(s);
    EXPECT_FALSE(run(s, c)) << s.rows << " x " << s.out << " x " << s.shared << " + " << s.each;
  }
  const Shape s{4224, 1152, 256, 64, 3, true};
  Case odd = make(s);
  odd.out = at::full({s.rows, s.out + 3}, 0, odd.out.options()).narrow(1, 0, s.out);
  EXPECT_FALSE(run(s, odd));
}

TEST_F(RegionParityGroupedGemm, PaysWithManyRowsAlone) {
  const auto pays = [&](std::int64_t rows) {
    return gemm_->pays({rows, 3072 + 3 * 64, 9216, 3, 3 * 64, 4096, 4096, 9216});
  };
  EXPECT_TRUE(pays(65536));
  for (const std::int64_t rows : {1, 77, 128}) EXPECT_FALSE(pays(rows)) << rows;
}

// Counts what runs through it, and can be told to leave all to the library, or nothing that can be done.
class Watched : public GroupedGemm {
 public:
  enum Use { kNever, kWhereItPays, kAlways };
  explicit Watched(std::shared_ptr<const GroupedGemm> gemm) : gemm_(std::move(gemm)) {}
  bool pays(const GroupedProduct& product) const override {
    return use == kAlways || (use == kWhereItPays && gemm_->pays(product));
  }
  bool run(const GroupedProduct& product, const GemmOperands& operands) const override {
    return gemm_->run(product, operands) && ++runs > 0;
  }
  Use use = kAlways;
  mutable int runs = 0;

 private:
  const std::shared_ptr<const GroupedGemm> gemm_;
};

// A block with adapters of rank 64 for q, k and v, which stand apart.
struct AdaptedBlock {
  AdaptedBlock(Make make, std::int64_t heads, std::int64_t image, std::int64_t text)
      : shape{.heads = heads, .head_dim = 128, .type = ElementType::kBF16, .adapters = true},
        program(make(shape).value()) {
    Sizes sizes{{"batch", 1}, {"image", image}, {"text", text}, {"tokens", image + text}};
    for (const auto& symbol : program.symbols())
      if (symbol.ends_with("rank")) sizes[symbol] = symbol.ends_with("apart_rank") ? 3 * 64 : 0;
    inputs = testing::random_inputs(program, sizes, 23, {.device = device()});
    const auto order = program.inputs();
    std::set<std::string> apart;
    for (const int index : order)
      if (const std::string& name = program.values[static_cast<std::size_t>(index)].name; name.ends_with(".apart"))
        apart.insert(name.substr(0, name.size() - 5) + "weight");
    products = static_cast<int>(apart.size());
    const std::int64_t width = heads * 128;
    for (std::size_t i = 0; i < order.size(); ++i)
      for (int g = 0; g < 3 && apart.contains(program.values[static_cast<std::size_t>(order[i])].name); ++g)
        for (int other = 0; other < 3; ++other)
          if (other != g) inputs[i].narrow(0, g * width, width).narrow(1, width + other * 64, 64).zero_();
  }
  // How far two runs of it are from the reference.
  void expect_as_good(const Outputs& got, const Outputs& theirs) const {
    const auto reference = interpret(program, testing::converted(inputs, ScalarType::Double));
    for (std::size_t o = 0; o < got.size(); ++o)
      EXPECT_LE(testing::relative_error(got[o], reference[o]), 1.01 * testing::relative_error(theirs[o], reference[o]))
          << program.block << " " << o;
  }

  BlockShape shape;
  Program program;
  std::vector<at::Tensor> inputs;
  int products = 0;  // those of q, k and v
};

Outputs outputs_of(Region& region, const std::vector<at::Tensor>& inputs) {
  Outputs outputs;
  region.run(inputs, outputs);
  return outputs;
}

// A block computes what it does without the kernel; recorded as a graph, too.
TEST_F(RegionParityGroupedGemm, BlocksComputeAsWell) {
  for (const auto& [make, products] : {std::pair(Make(flux_double_block), 2), std::pair(Make(flux_single_block), 1)}) {
    const AdaptedBlock block(make, 3, 1024, 96);
    ASSERT_EQ(block.products, products);
    const auto watched = std::make_shared<Watched>(gemm_);
    host_->grouped_gemm = watched;
    Region region(
        "adapted", [&](ElementType) -> Result<Program> { return block.program; }, host_);
    watched->use = Watched::kNever;
    const Outputs theirs = outputs_of(region, block.inputs);
    EXPECT_EQ(watched->runs, 0);
    watched->use = Watched::kAlways;
    const Outputs got = outputs_of(region, block.inputs);
    EXPECT_EQ(watched->runs, products);
    block.expect_as_good(got, theirs);
    const auto graphs = make_graphs(device(), 2);
    if (!graphs) continue;
    for (int call = 0; call < 4; ++call)
      EXPECT_TRUE(graphs
                      ->run({1}, block.inputs,
                            [&](const std::vector<at::Tensor>& recorded) { return outputs_of(region, recorded)[0]; })
                      .equal(got[0]))
          << block.program.block << " call " << call;
    EXPECT_EQ(watched->runs, 3 * products) << "two calls of four replay";
  }
}

// FLUX.1-dev's blocks at 1024².
TEST_F(RegionParityGroupedGemm, BlocksOfFluxComputeAsWell) {
  for (const Make make : {Make(flux_double_block), Make(flux_single_block)}) {
    const AdaptedBlock block(make, 24, 4096, 512);
    const auto watched = std::make_shared<Watched>(gemm_);
    host_->grouped_gemm = watched;
    Region region(
        "adapted", [&](ElementType) -> Result<Program> { return block.program; }, host_);
    watched->use = Watched::kNever;
    const Outputs theirs = outputs_of(region, block.inputs);
    watched->use = Watched::kWhereItPays;
    const Outputs got = outputs_of(region, block.inputs);
    EXPECT_EQ(watched->runs, 1) << "the picture's tokens, but not the text's alone";
    block.expect_as_good(got, theirs);
  }
}

}  // namespace
}  // namespace ditfleet::region
