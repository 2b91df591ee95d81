// Blocks with room for adapters: one program for any ranks, none included, and for other adapters in each
// sample.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include <random>

#include "pipeline/region/run/interpreter.h"
#include "tests/parity/region_fixture.h"

namespace ditfleet::region {
namespace {

using c10::ScalarType;
using testing::converted;
using testing::relative_error;

const Make kBlocks[] = {flux_double_block, flux_single_block, wan_block_of};

Region::Recipe adapted(Make make, std::int64_t heads, std::int64_t head_dim) {
  return [=](ElementType type) { return make({.heads = heads, .head_dim = head_dim, .type = type, .adapters = true}); };
}

bool is_rank(const std::string& symbol) { return symbol.ends_with(".rank"); }

int input_called(const Program& program, const std::string& name) {
  const auto order = program.inputs();
  for (std::size_t i = 0; i < order.size(); ++i)
    if (program.values[static_cast<std::size_t>(order[i])].name == name) return static_cast<int>(i);
  return -1;
}

TEST_F(RegionParity, AdaptersOfAnyRankShareOneProgram) {
  std::mt19937_64 random(20261122);
  const auto between = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  for (const Make make : kBlocks)
    for (const auto& [heads, head_dim] : {std::pair<std::int64_t, std::int64_t>{6, 32}, {3, 10}, {2, 128}})
      for (ElementType type : {ElementType::kF32, ElementType::kBF16}) {
        const auto shared = host({.fullgraph = true, .error_on_recompile = true});
        const auto recipe = adapted(make, heads, head_dim);
        Region region("adapted", recipe, shared);
        const Program program = recipe(type).value();
        for (int round = 0; round < 8; ++round) {
          Sizes sizes{{"batch", between(1, 3)}};
          for (const auto& symbol : program.symbols())
            if (is_rank(symbol))
              sizes[symbol] = round == 0 || between(0, 3) == 0 ? 0 : round % 2 ? 16 * between(1, 3) : between(1, 20);
            else if (symbol != "batch")
              sizes[symbol] = between(1, 30);
          const auto inputs =
              inputs_for(program, sizes, random(), {.strided = round % 3 == 1, .outliers = round % 4 == 2});
          Outputs got;
          region.run(inputs, got);
          const auto eager = interpret(program, inputs),
                     reference = interpret(program, converted(inputs, ScalarType::Double));
          for (std::size_t o = 0; o < got.size(); ++o) {
            const double mine = relative_error(got[o], reference[o]), theirs = relative_error(eager[o], reference[o]);
            const std::string where = program.block + " " + std::string(name_of(type)) + " heads " +
                                      std::to_string(heads) + " round " + std::to_string(round);
            EXPECT_LE(mine, type == ElementType::kBF16 ? 1.1 * theirs : 2e-6) << where;
          }
        }
        EXPECT_EQ(shared->counters->counts().compiles, 1u);
        EXPECT_EQ(shared->counters->counts().fallbacks, 0u);
      }
}

// Without adapters it computes what the plain block does, and a rank's columns are what the formula says they are.
TEST_F(RegionParity, AdaptersAddTheirProduct) {
  for (const Make make : kBlocks) {
    const auto recipe = adapted(make, 4, 16);
    const Program program = recipe(ElementType::kF32).value(), plain = program_of(make, 4, 16, ElementType::kF32);
    Sizes sizes{{"batch", 2}, {"image", 11}, {"text", 5}, {"tokens", 16}};
    for (const auto& symbol : program.symbols())
      if (is_rank(symbol)) sizes[symbol] = 3;
    const auto inputs = inputs_for(program, sizes, 5);
    // The weights with the products added to them, sample by sample, in fp64.
    Outputs got;
    Region("adapted", recipe, host({.fullgraph = true})).run(inputs, got);
    for (std::int64_t sample = 0; sample < 2; ++sample) {
      std::vector<at::Tensor> merged;
      for (int index : plain.inputs()) {
        const Value& value = plain.values[static_cast<std::size_t>(index)];
        const at::Tensor t = inputs[static_cast<std::size_t>(input_called(program, value.name))].to(ScalarType::Double);
        const int adapter = input_called(program, value.name.substr(0, value.name.rfind('.')) + ".adapter");
        if (value.name.ends_with(".weight") && adapter >= 0) {
          const at::Tensor a = inputs[static_cast<std::size_t>(adapter)].to(ScalarType::Double)[sample];
          const std::int64_t rank = a.size(0), in = a.size(1);
          const bool before = value.name == "mlp_in.weight" && plain.block == "flux.single";
          merged.push_back(t.narrow(1, before ? rank : 0, in) + t.narrow(1, before ? 0 : in, rank).mm(a));
        } else if (value.kind == ValueKind::kActivation || (value.kind == ValueKind::kTable && value.name != "rope")) {
          merged.push_back(t.narrow(0, sample, 1));
        } else {
          merged.push_back(t);
        }
      }
      const auto expected = interpret(plain, merged);
      for (std::size_t o = 0; o < got.size(); ++o)
        EXPECT_LE(relative_error(got[o].narrow(0, sample, 1), expected[o]), 2e-6) << plain.block;
    }
  }
}

// A sample gets the same whoever is in the batch with it.
TEST_F(RegionParity, SamplesOfABatchHaveAdaptersOfTheirOwn) {
  for (const Make make : kBlocks) {
    const auto recipe = adapted(make, 4, 16);
    const Program program = recipe(ElementType::kF32).value();
    Sizes sizes{{"batch", 3}, {"image", 7}, {"text", 4}, {"tokens", 11}};
    for (const auto& symbol : program.symbols())
      if (is_rank(symbol)) sizes[symbol] = 12;
    auto inputs = inputs_for(program, sizes, 9);
    const auto order = program.inputs();
    for (std::size_t i = 0; i < order.size(); ++i)  // sample s uses rows 4s … 4s + 3, the last sample none
      if (program.values[static_cast<std::size_t>(order[i])].kind == ValueKind::kAdapter) {
        at::Tensor own = at::zeros_like(inputs[i]);
        for (std::int64_t s = 0; s < 2; ++s) own[s].narrow(0, 4 * s, 4).copy_(inputs[i][s].narrow(0, 4 * s, 4));
        inputs[i] = own;
      }
    Region region("adapted", recipe, host({.fullgraph = true}));
    Outputs together;
    region.run(inputs, together);
    for (std::int64_t s = 0; s < 3; ++s) {
      auto alone = inputs;
      for (std::size_t i = 0; i < order.size(); ++i) {
        const Value& value = program.values[static_cast<std::size_t>(order[i])];
        if (value.name != "rope" && value.kind != ValueKind::kParameter) alone[i] = inputs[i].narrow(0, s, 1);
      }
      Outputs one;
      region.run(alone, one);
      for (std::size_t o = 0; o < one.size(); ++o)
        EXPECT_LE(relative_error(together[o].narrow(0, s, 1), one[o]), 2e-6) << program.block << " " << s;
    }
  }
}

}  // namespace
}  // namespace ditfleet::region
