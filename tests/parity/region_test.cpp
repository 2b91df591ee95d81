// Compiled regions (cpu_jit, or nvrtc on a GPU) against eager and a wide reference, over random shapes, batches,
// strides and types.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/view_as_complex.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <random>

#include "pipeline/families/flux/blocks.h"
#include "pipeline/region/ir/builder.h"
#include "pipeline/region/run/interpreter.h"
#include "tests/parity/region_fixture.h"
#include "tests/unit/pipeline/region/region_temporal_block.h"

namespace ditfleet::region {
namespace {

using c10::ScalarType;
using testing::converted;
using testing::relative_error;

struct Shape {
  Make make;
  const char* first;  // the symbols that vary
  const char* second;
  const char* third = nullptr;
  std::int64_t least = 0;  // of the third
};
const Shape kShapes[] = {{flux_double_block, "image", "text"},
                         {flux_single_block, "tokens", "tokens"},
                         {temporal_block, "frames", "places"},
                         {wan_block_of, "tokens", "text"},
                         {wan_still_block_of, "tokens", "text", "still"},
                         {wan_image_block_of, "tokens", "text", "image", 1}};

// One region for each block and type serves every shape: errors are within 1.1 of eager's, and nothing is compiled
// twice.
TEST_F(RegionParity, ErrsNoMoreThanEagerOverRandomShapes) {
  std::mt19937_64 random(20261121);
  const auto between = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  double worst = 0, worst_f32 = 0;
  for (const Shape& shape : kShapes)
    for (const auto& [heads, head_dim] : {std::pair<std::int64_t, std::int64_t>{6, 32}, {3, 10}, {2, 128}})
      for (ElementType type : {ElementType::kF32, ElementType::kBF16}) {
        const auto shared = host({.fullgraph = true});
        Region region("parity", recipe(shape.make, heads, head_dim), shared);
        const Program program = program_of(shape.make, heads, head_dim, type);
        for (int round = 0; round < 6; ++round) {
          Sizes sizes{{"batch", between(1, 3)}, {shape.first, between(1, 40)}, {shape.second, between(1, 23)}};
          if (shape.third) sizes[shape.third] = round == 0 ? shape.least : between(1, 9);
          const testing::InputStyle style{.strided = round % 2 == 1, .outliers = round % 3 == 2};
          const auto inputs = inputs_for(program, sizes, random(), style);
          Outputs got;
          region.run(inputs, got);
          const auto eager = interpret(program, inputs),
                     reference = interpret(program, converted(inputs, ScalarType::Double));
          for (std::size_t o = 0; o < got.size(); ++o) {
            const double mine = relative_error(got[o], reference[o]), theirs = relative_error(eager[o], reference[o]);
            const std::string where = program.block + " " + std::string(name_of(type)) + " heads " +
                                      std::to_string(heads) + "x" + std::to_string(head_dim) + " batch " +
                                      std::to_string(sizes.at("batch")) + " " + shape.first + " " +
                                      std::to_string(sizes.at(shape.first)) + " round " + std::to_string(round);
            if (type == ElementType::kBF16) {
              EXPECT_LE(mine, 1.1 * theirs) << where;
              worst = std::max(worst, mine / theirs);
            } else {  // both are rounding noise: within a few units of the last place
              EXPECT_LE(mine, 2e-6) << where;
              worst_f32 = std::max(worst_f32, mine);
            }
          }
        }
        EXPECT_EQ(shared->counters->counts().compiles, 1u);
        EXPECT_EQ(shared->counters->counts().recompiles, 0u);
        EXPECT_EQ(shared->counters->counts().fallbacks, 0u);
      }
  RecordProperty("worst_bf16_ratio", std::to_string(worst));
  RecordProperty("worst_f32_error", std::to_string(worst_f32));
}

// On a CPU what eager rounds is rounded. What differs is the order of a row's sum, which now and then
// moves a rounding.
TEST_F(RegionParity, RoundsAsEagerDoesOnACpu) {
  if (!device().is_cpu()) GTEST_SKIP() << "kernels for GPUs round what they store alone";
  for (const Shape& shape : kShapes) {
    Region region("rounding", recipe(shape.make, 3, 32), host({.fullgraph = true}));
    const Program program = program_of(shape.make, 3, 32, ElementType::kBF16);
    for (std::uint64_t seed : {1, 2, 3}) {
      Sizes sizes{{"batch", 1}, {shape.first, 24}, {shape.second, 17}};
      if (shape.third) sizes[shape.third] = 5;
      const auto inputs = inputs_for(program, sizes, seed);
      Outputs got;
      region.run(inputs, got);
      const auto eager = interpret(program, inputs);
      for (std::size_t o = 0; o < got.size(); ++o)
        EXPECT_LE(relative_error(got[o], eager[o]), 1e-3) << program.block << " seed " << seed << " output " << o;
    }
  }
}

TEST_F(RegionParity, OneTemporalProgramForEveryFrameCount) {
  const auto shared = host({.fullgraph = true, .error_on_recompile = true});
  Region region("temporal", recipe(temporal_block, 2, 16), shared);
  const Program program = program_of(temporal_block, 2, 16, ElementType::kF32);
  for (std::int64_t frames : {25, 49, 61, 81}) {
    const auto inputs = inputs_for(program, {{"batch", 1}, {"frames", frames}, {"places", 6}}, 7);
    Outputs got;
    region.run(inputs, got);
    EXPECT_LE(relative_error(got[0], interpret(program, inputs)[0]), 2e-6) << frames;
  }
  EXPECT_EQ(shared->counters->counts().compiles, 1u);
  EXPECT_EQ(shared->counters->counts().variants, 4u);
}

// A kernel that notes which rows it was called for: with two threads there are two calls at least.
TEST_F(RegionParity, RowsAreSharedOutToLibTorchsThreads) {
  Source source;
  source.text =
      "extern \"C\" void note(const long long* a, long long first, long long end) { ((long long*)a[0])[first] = end; "
      "}\n";
  source.kernels.push_back({.name = "note", .argument_words = 1});
  const auto compiled = (*open_cpu_jit())->compile("note", source, kHostArch);
  ASSERT_TRUE(compiled) << compiled.error().message;
  constexpr std::int64_t kRows = 64;
  const auto launcher = host_launcher(*HostModule::load(*compiled), {65536});  // each worth a thread
  std::vector<long long> ends(kRows, 0);
  ResolvedRows step{.kernel = 0, .instances = {{.rows = kRows}}, .rows = kRows};
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  launcher->launch(step, {{reinterpret_cast<long long>(ends.data())}});
  at::set_num_threads(before);
  std::int64_t at = 0, calls = 0;
  for (; at < kRows && ends[static_cast<std::size_t>(at)] > at; ++calls) at = ends[static_cast<std::size_t>(at)];
  EXPECT_EQ(at, kRows) << "every row once";
#ifndef __clang__  // whose OpenMP is another
  EXPECT_EQ(calls, 2);
#endif
}

// Rows longer than a kernel takes go through it in tiles; what is broadcast to them too.
TEST_F(RegionParity, LongRowsAreTakenInTiles) {
  const Region::Recipe wide = [](ElementType type) {
    const Dim batch = Dim::symbol("batch"), tokens = Dim::symbol("tokens"), width = 5 * kMaxRowWidth / 4;
    Builder b("wide", type);
    const auto x = b.activation("x", {batch, tokens, width});
    return b.finish({b.modulate("y", b.silu("bent", x), b.table("scale", type, {batch, 1, width}),
                                b.table("shift", type, {batch, 1, width}))});
  };
  const auto shared = host({.fullgraph = true});
  Region region("wide", wide, shared);
  const Program program = *wide(ElementType::kF32);
  for (const bool strided : {false, true}) {
    const auto inputs = inputs_for(program, {{"batch", 2}, {"tokens", 3}}, 4, {.strided = strided});
    Outputs got;
    region.run(inputs, got);
    EXPECT_LE(relative_error(got[0], interpret(program, inputs)[0]), 2e-6) << strided;
  }
}

TEST_F(RegionParity, SwigluAndNormsWithoutWeightsAreLibTorchs) {
  constexpr std::int64_t kHalf = 33;
  const Region::Recipe both = [](ElementType type) {
    Builder b("both", type);
    const auto x = b.activation("x", {Dim::symbol("batch"), Dim::symbol("tokens"), 2 * kHalf});
    return b.finish({b.swiglu("y", x), b.rms_norm("z", x, {}, 1e-5)});
  };
  for (const ElementType type : {ElementType::kF32, ElementType::kBF16}) {
    Region region("both", both, host({.fullgraph = true}));
    const Program program = *both(type);
    for (const bool strided : {false, true}) {
      const auto inputs = inputs_for(program, {{"batch", 2}, {"tokens", 3}}, 4, {.strided = strided});
      const at::Tensor &x = inputs[0], wide = x.to(ScalarType::Double);
      const auto eager = interpret(program, inputs);
      EXPECT_TRUE(eager[0].equal(at::silu(x.narrow(2, 0, kHalf)) * x.narrow(2, kHalf, kHalf)));
      EXPECT_TRUE(eager[1].equal(at::rms_norm(x, {2 * kHalf}, {}, 1e-5)));
      Outputs got;
      region.run(inputs, got);
      const auto reference = interpret(program, {wide});
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_LE(relative_error(got[i], reference[i]),
                  type == ElementType::kF32 ? 2e-6 : 1.1 * relative_error(eager[i], reference[i]))
            << i << (strided ? " strided" : "");
    }
  }
}

// What is not a number stays so, and large arguments of exp do no harm.
TEST_F(RegionParity, GeluKeepsItsEnds) {
  const Region::Recipe gelu = [](ElementType type) {
    Builder b("gelu", type);
    return b.finish({b.gelu_tanh("y", b.activation("x", {Dim::symbol("rows"), 8}))});
  };
  Region region("gelu", gelu, host({.fullgraph = true}));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float values[] = {nan, 0.0f, -0.0f, 30.0f, -30.0f, 1e4f, -1e4f, 5.5f};
  const at::Tensor x = at::from_blob(values, {1, 8}).clone().to(device());
  Outputs got;
  region.run({x}, got);
  const at::Tensor y = got[0].cpu();
  const float* out = y.const_data_ptr<float>();
  EXPECT_TRUE(std::isnan(out[0]));
  for (int i : {1, 2}) EXPECT_EQ(out[i], 0.0f) << i;
  EXPECT_EQ(out[3], 30.0f);
  EXPECT_NEAR(out[4], 0.0f, 1e-30f);
  EXPECT_EQ(out[5], 1e4f);
  EXPECT_NEAR(out[6], 0.0f, 1e-30f);
  EXPECT_NEAR(out[7], 5.5f, 1e-6f);
}

// The interpreter is the reference: it must be what families/flux/blocks.cpp computes, bit for bit.
TEST_F(RegionParity, EagerIsWhatTheModelComputes) {
  for (ElementType type : {ElementType::kF32, ElementType::kBF16}) {
    const std::int64_t heads = 4, head_dim = 16, text = 5, image = 12;
    const pipeline::BlockGeometry geometry{heads, head_dim};
    const Program program = program_of(flux_double_block, heads, head_dim, type);
    const auto inputs = inputs_for(program, {{"batch", 1}, {"image", image}, {"text", text}}, 3);
    const auto of = [&](const std::string& name) {
      const auto order = program.inputs();
      for (std::size_t i = 0; i < order.size(); ++i)
        if (program.values[static_cast<std::size_t>(order[i])].name == name) return inputs[i];
      ADD_FAILURE() << "no input " << name;
      return at::Tensor();
    };
    pipeline::TransformerBlock block{0, {}, {}};
    for (const std::string name : kDoubleLinears) block.linears.push_back({of(name + ".weight"), of(name + ".bias")});
    for (const char* name : {"image.norm_q", "image.norm_k", "text.norm_q", "text.norm_k"})
      block.tensors.push_back(of(name));
    const auto rows = [&](const std::string& p) {
      return pipeline::Modulation{of(p + "shift"), of(p + "scale"), of(p + "gate")};
    };
    at::Tensor x = of("image"), y = of("text");
    const at::Tensor rope = at::view_as_complex(of("rope").unflatten(1, {head_dim / 2, 2})).unsqueeze(0).unsqueeze(2);
    pipeline::double_block(x, y, block,
                           {rows("image.attention_"), rows("image.mlp_"), rows("text.attention_"), rows("text.mlp_")},
                           rope, geometry);
    const auto made = interpret(program, inputs);
    EXPECT_TRUE(made[0].equal(x));
    EXPECT_TRUE(made[1].equal(y));
  }
}

TEST_F(RegionParity, UpdatesActivationsInPlace) {
  Region region("single", recipe(flux_single_block, 2, 16), host());
  const Program program = program_of(flux_single_block, 2, 16, ElementType::kF32);
  auto inputs = inputs_for(program, {{"batch", 2}, {"tokens", 9}}, 5);
  Outputs apart;
  region.run(inputs, apart);
  Outputs in_place{inputs[0]};
  region.run(inputs, in_place);
  EXPECT_EQ(in_place[0].data_ptr(), inputs[0].data_ptr());
  EXPECT_TRUE(in_place[0].equal(apart[0]));
}

}  // namespace
}  // namespace ditfleet::region
