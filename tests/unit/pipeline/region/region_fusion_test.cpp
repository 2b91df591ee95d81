// Fusion: what becomes one kernel, where values lie, and what the generators make of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pipeline/families/flux/block_programs.h"
#include "pipeline/families/wan/block_program.h"
#include "pipeline/region/codegen/source.h"
#include "pipeline/region/ir/builder.h"
#include "tests/unit/pipeline/region/region_temporal_block.h"

namespace ditfleet::region {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

Plan plan_of(const Result<Program>& program) {
  EXPECT_TRUE(program) << program.error().message;
  auto plan = fuse(*program);
  EXPECT_TRUE(plan) << plan.error().message;
  return *plan;
}

BlockShape shape(ElementType type) { return {.heads = 6, .head_dim = 32, .type = type}; }

template <class T>
std::vector<const T*> steps_of(const Plan& plan) {
  std::vector<const T*> found;
  for (const Step& step : plan.steps)
    if (const auto* one = std::get_if<T>(&step)) found.push_back(one);
  return found;
}

std::vector<std::string> kernel_names(const Plan& plan) {
  std::vector<std::string> names;
  for (const auto& kernel : plan.kernels) names.push_back(kernel.name);
  return names;
}

TEST(RegionFusion, DoubleBlockIsFiveKernelsForBothStreams) {
  for (ElementType type : {ElementType::kF32, ElementType::kBF16}) {
    const Plan plan = plan_of(flux_double_block(shape(type)));
    EXPECT_THAT(kernel_names(plan),
                ElementsAre("layer_norm_modulate_192", "rms_norm_rope_32", "gate_residual_layer_norm_modulate_192",
                            "gelu_tanh_768", "gate_residual_192"));
    const auto rows = steps_of<RowStep>(plan);
    ASSERT_EQ(rows.size(), 5u);
    for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i]->instances.size(), i == 1 ? 4u : 2u) << i;
    EXPECT_TRUE(steps_of<CopyStep>(plan).empty()) << print(plan);
  }
}

// On a GPU a block's GELU rides the product in bf16.
TEST(RegionFusion, GeluRidesTheProductInBf16) {
  for (ElementType type : {ElementType::kF32, ElementType::kBF16}) {
    const bool rides = type == ElementType::kBF16;
    for (const auto& program : {flux_double_block(shape(type)), flux_single_block(shape(type))}) {
      const auto plan = fuse(*program, {.gelu_in_gemm = true, .copies_in_rows = true});
      ASSERT_TRUE(plan);
      const auto names = kernel_names(*plan);
      EXPECT_EQ(std::count(names.begin(), names.end(), "gelu_tanh_768"), rides ? 0 : 1) << print(*plan);
      std::int64_t riding = 0;
      for (const GemmStep* gemm : steps_of<GemmStep>(*plan)) {
        if (!gemm->gelu) continue;
        ++riding;
        EXPECT_THAT(gemm->name, HasSubstr("mlp_hidden")) << "the step is called after what it leaves";
      }
      EXPECT_EQ(riding, !rides ? 0 : program->block == "flux.double" ? 2 : 1);
      EXPECT_TRUE(steps_of<CopyStep>(*plan).empty()) << print(*plan);
    }
  }
}

TEST(RegionFusion, GeluThatIsNotAloneStaysAKernel) {
  const auto block = [](bool second_reader) {
    Builder b("mlp", ElementType::kBF16);
    const auto x = b.activation("x", {Dim::symbol("rows"), 8});
    const auto inner = b.linear("inner", x, b.linear_slots("w", 8, 16));
    const auto bent = b.gelu_tanh("bent", inner);
    return b.finish(
        {second_reader ? b.add("sum", b.cast("copy", inner, ElementType::kF32), b.cast("wide", bent, ElementType::kF32))
                       : bent});
  };
  for (bool second_reader : {false, true}) {
    const auto plan = fuse(*block(second_reader), {.gelu_in_gemm = true});
    ASSERT_TRUE(plan);
    EXPECT_EQ(steps_of<GemmStep>(*plan)[0]->gelu, !second_reader) << print(*plan);
  }
}

TEST(RegionFusion, QueryAndKeyAreRotatedWhereTheGemmPutThem) {
  const Plan plan = plan_of(flux_double_block(shape(ElementType::kBF16)));
  for (const auto& instance : steps_of<RowStep>(plan)[1]->instances)
    EXPECT_TRUE(same_place(instance.operands.front().view, instance.operands.back().view));
  const auto gemms = steps_of<GemmStep>(plan);
  EXPECT_EQ(gemms[0]->out.buffer, gemms[1]->out.buffer) << "text and image are projected into one buffer";
  EXPECT_EQ(steps_of<AttentionStep>(plan)[0]->q.buffer, gemms[0]->out.buffer);
}

// q and k are rounded to f8 by the kernel that rotates them, so there is no more to do, and v is left as it is.
TEST(RegionFusion, EightBitAttentionRoundsInTheKernelThatRotates) {
  const ElementType type = ElementType::kBF16;
  for (const auto& program : {flux_double_block(shape(type)), flux_single_block(shape(type)),
                              wan_block({.heads = 6, .head_dim = 32, .ffn = 384, .type = type})}) {
    const Program narrow = with_f8_attention(*program);
    ASSERT_TRUE(verify(narrow)) << verify(narrow).error().message;
    const auto plan = fuse(narrow, {.gelu_in_gemm = true, .attention_token_stride = true, .copies_in_rows = true}),
               before = fuse(*program, {.gelu_in_gemm = true, .attention_token_stride = true, .copies_in_rows = true});
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_EQ(plan->steps.size(), before->steps.size()) << print(narrow);
    const AttentionStep& self = *steps_of<AttentionStep>(*plan).front();
    EXPECT_EQ(plan->buffer(self.q.buffer).type, ElementType::kF8);
    EXPECT_EQ(plan->buffer(self.k.buffer).type, ElementType::kF8);
    EXPECT_EQ(plan->buffer(self.v.buffer).type, type);
    EXPECT_EQ(plan->buffer(self.out.buffer).type, type);
    for (const AttentionStep* one : steps_of<AttentionStep>(*plan))
      EXPECT_EQ(plan->buffer(one->q.buffer).type, one == &self ? ElementType::kF8 : type) << "only self-attention";
  }
}

TEST(RegionFusion, ActivationsMayBeUpdatedInPlace) {
  const Plan plan = plan_of(flux_double_block(shape(ElementType::kF32)));
  ASSERT_EQ(plan.may_replace.size(), 2u);
  EXPECT_EQ(plan.program.values[static_cast<std::size_t>(plan.may_replace[0])].name, "image");
  EXPECT_EQ(plan.program.values[static_cast<std::size_t>(plan.may_replace[1])].name, "text");
}

TEST(RegionFusion, SingleBlockNeverJoinsInF32AndWritesSlicesInBf16) {
  const Plan exact = plan_of(flux_single_block(shape(ElementType::kF32)));
  EXPECT_TRUE(steps_of<CopyStep>(exact).empty());
  EXPECT_EQ(steps_of<GemmStep>(exact).back()->parts.size(), 2u);
  EXPECT_EQ(steps_of<GemmStep>(exact).back()->parts[1].first_column, 192);
  // In bf16 a second GEMM would round its sum once more: the MLP's rows go beside the attention's.
  const Plan half = plan_of(flux_single_block(shape(ElementType::kBF16)));
  EXPECT_EQ(steps_of<GemmStep>(half).back()->parts.size(), 1u);
  EXPECT_TRUE(steps_of<CopyStep>(half).empty());
  EXPECT_EQ(steps_of<AttentionStep>(half)[0]->out.buffer, steps_of<GemmStep>(half).back()->parts[0].x.buffer);
}

// Attention's rows lie where products read them, with room beside them for what is joined to them: one buffer for text
// and image, and one pitch for all blocks with and without adapters.
TEST(RegionFusion, AttentionIsWrittenBesideWhatItIsJoinedWith) {
  for (const bool on_gpu : {true, false})
    for (const bool adapters : {true, false}) {
      auto block = shape(ElementType::kBF16);
      block.adapters = adapters;
      for (const auto& program : {flux_double_block(block), flux_single_block(block)}) {
        const auto plan =
            fuse(*program, {.gelu_in_gemm = on_gpu, .attention_token_stride = on_gpu, .copies_in_rows = on_gpu});
        ASSERT_TRUE(plan);
        const bool joined = adapters || program->block == "flux.single";
        EXPECT_TRUE(steps_of<CopyStep>(*plan).empty()) << print(*plan);
        EXPECT_THAT(kernel_names(*plan), Each(Not(HasSubstr("copy")))) << print(*plan);
        const View& out = steps_of<AttentionStep>(*plan)[0]->out;
        const Buffer& buffer = plan->buffers[static_cast<std::size_t>(out.buffer)];
        EXPECT_EQ(buffer.kind, joined || on_gpu ? BufferKind::kWorkspace : BufferKind::kLibrary) << print(*plan);
        if (on_gpu) {
          EXPECT_EQ(out.strides[1], Dim(block.attention_token_stride()));
        }
        int readers = 0;
        for (const GemmStep* gemm : steps_of<GemmStep>(*plan))
          for (const auto& part : gemm->parts) readers += part.x.buffer == out.buffer;
        EXPECT_EQ(readers, (program->block.starts_with("flux.double") ? 2 : 1) * (adapters ? 2 : 1))
            << "products and those of their adapters read it there: " << print(*plan);
      }
    }
}

// Ranks exchange q, k and v while the MLP's first product is computed, which needs neither.
TEST(RegionFusion, AttentionAcrossRanksComesAfterTheProductsThatDoNotNeedIt) {
  for (const auto type : {ElementType::kF32, ElementType::kBF16})
    for (const bool on_gpu : {true, false})
      for (const bool adapters : {true, false}) {
        auto block = shape(type);
        block.adapters = adapters;
        const auto plan = fuse(*flux_single_block(block), {.gelu_in_gemm = on_gpu && type == ElementType::kBF16,
                                                           .attention_token_stride = on_gpu,
                                                           .copies_in_rows = on_gpu});
        ASSERT_TRUE(plan);
        std::size_t products = 0, before = 0;
        for (const Step& step : plan->steps) {
          const auto* gemm = std::get_if<GemmStep>(&step);
          products += gemm && gemm->out.shape.back() == Dim(block.mlp_width());
          if (std::holds_alternative<AttentionStep>(step)) before = products;
        }
        EXPECT_GT(products, 0u);
        EXPECT_EQ(before, products) << print(*plan);
      }
}

TEST(RegionFusion, TemporalBlockNeedsNoCopies) {
  EXPECT_TRUE(steps_of<CopyStep>(plan_of(temporal_block(shape(ElementType::kBF16)))).empty());
}

TEST(RegionFusion, WaitsForNothingThatWaitsForIt) {
  // b depends on a through a linear: the chain must not swallow the last add.
  Builder b("circle", ElementType::kF32);
  const auto x = b.activation("x", {Dim::symbol("rows"), 8});
  const auto a = b.silu("a", x);
  const auto y = b.linear("y", a, b.linear_slots("w", 8, 8));
  const auto out = b.add("out", a, y);
  const Plan plan = plan_of(b.finish({out}));
  ASSERT_EQ(plan.steps.size(), 3u) << print(plan);
  EXPECT_TRUE(std::holds_alternative<RowStep>(plan.steps[0]));
  EXPECT_TRUE(std::holds_alternative<GemmStep>(plan.steps[1]));
  EXPECT_TRUE(std::holds_alternative<RowStep>(plan.steps[2]));
}

TEST(RegionFusion, KeepsWhatIsReadLater) {
  // `a` is read by the linear after `c` was made of it: `c` may not take its place.
  Builder b("late", ElementType::kF32);
  const auto x = b.activation("x", {Dim::symbol("rows"), 8});
  const auto a = b.linear("a", x, b.linear_slots("w", 8, 8));
  const auto c = b.silu("c", a);
  const auto d = b.linear("d", a, b.linear_slots("v", 8, 8));
  const auto e = b.add("e", c, d);
  const Plan plan = plan_of(b.finish({e}));
  const auto rows = steps_of<RowStep>(plan);
  const auto& silu = rows.front()->instances[0].operands;
  EXPECT_NE(silu[0].view.buffer, silu[1].view.buffer) << print(plan);
}

TEST(RegionFusion, OutputsThatNoKernelWritesAreCopied) {
  Builder b("plain", ElementType::kF32);
  const auto x = b.activation("x", {Dim::symbol("rows"), 8});
  const Plan plan = plan_of(b.finish({b.slice("half", b.linear("y", x, b.linear_slots("w", 8, 8)), 1, 4, 4)}));
  ASSERT_EQ(steps_of<CopyStep>(plan).size(), 1u);
  EXPECT_EQ(plan.buffers[static_cast<std::size_t>(steps_of<CopyStep>(plan)[0]->to.buffer)].kind, BufferKind::kOutput);
}

TEST(RegionFusion, NamesTheOpThatHasNoKernel) {
  Builder b("exact", ElementType::kF32);
  const auto x = b.activation("x", {Dim::symbol("rows"), 8});
  const auto program = b.finish({b.gelu_erf("y", x)});
  ASSERT_TRUE(program);
  const auto plan = fuse(*program);
  ASSERT_FALSE(plan);
  EXPECT_THAT(plan.error().message, HasSubstr("[exact] y = gelu_erf: no generated kernel has this op"));
}

TEST(RegionFusion, RefusesRowsThatAreTooLong) {
  const auto refusal = [](std::int64_t width, bool norm) {
    Builder b("wide", ElementType::kF32);
    const auto x = b.activation("x", {Dim::symbol("rows"), width});
    const auto plan = fuse(*b.finish({norm ? b.layer_norm("y", x, 1e-6) : b.silu("y", x)}));
    return plan ? "" : plan.error().message;
  };
  EXPECT_EQ(refusal(kMaxRowWidth, true), "");
  EXPECT_THAT(refusal(2 * kMaxRowWidth, true), HasSubstr("do not fit one kernel")) << "a norm needs its row";
  EXPECT_THAT(refusal(kMaxRowWidth + 3, false), HasSubstr("do not fit one kernel")) << "a prime number has no tiles";
}

// Chains without a norm take long rows in tiles; a GELU that rides its product is no kernel at all.
TEST(RegionFusion, LongRowsAreTakenInTiles) {
  const BlockShape large{.heads = 72, .head_dim = 128, .type = ElementType::kBF16};
  for (const auto& program : {flux_double_block(large), flux_single_block(large)}) {
    const Plan plan = plan_of(program);
    EXPECT_THAT(kernel_names(plan), ::testing::Contains("gelu_tanh_18432"));
    for (const RowStep* step : steps_of<RowStep>(plan)) {
      if (plan.kernels[static_cast<std::size_t>(step->kernel)].name != "gelu_tanh_18432") continue;
      for (const auto& instance : step->instances) {
        EXPECT_EQ(instance.extents[kOuterAxes - 1], Dim(2)) << print(plan);
        for (const auto& operand : instance.operands) EXPECT_EQ(operand.strides[kOuterAxes - 1], Dim(18432));
      }
    }
    const auto riding = fuse(*program, {.gelu_in_gemm = true, .attention_token_stride = true, .copies_in_rows = true});
    ASSERT_TRUE(riding) << riding.error().message;
    EXPECT_THAT(kernel_names(*riding), Not(::testing::Contains(HasSubstr("gelu"))));
  }
}

TEST(RegionSource, IsTheSameEveryTimeAndHasNoHeader) {
  for (ElementType type : {ElementType::kF32, ElementType::kBF16}) {
    const auto cuda = generate_cuda(plan_of(flux_double_block(shape(type)))).text,
               cpp = generate_cpp(plan_of(flux_double_block(shape(type)))).text;
    EXPECT_EQ(cuda, generate_cuda(plan_of(flux_double_block(shape(type)))).text);
    EXPECT_EQ(cpp, generate_cpp(plan_of(flux_double_block(shape(type)))).text);
    EXPECT_THAT(cuda, Not(HasSubstr("#include")));
    EXPECT_THAT(cpp, Not(HasSubstr("#include")));
  }
}

TEST(RegionSource, SizesAreNotInIt) {
  // One program for every frame count: the symbols leave no trace in the text.
  const auto program = temporal_block(shape(ElementType::kBF16));
  const std::string text = generate_cuda(plan_of(program)).text;
  for (int frames : {25, 49, 61, 81})
    EXPECT_EQ(generate_cuda(plan_of(program->bind({{"frames", frames}}))).text, text) << frames;
  EXPECT_THAT(text, Not(HasSubstr("frames")));
}

TEST(RegionSource, HasEveryVariant) {
  const Source source = generate_cuda(plan_of(flux_single_block(shape(ElementType::kBF16))));
  for (const auto& launch : source.kernels)
    for (const char* variant : {"_i32_v", "_i64_v", "_i64_s"})
      EXPECT_THAT(source.text, HasSubstr(" " + launch.name + variant + "(")) << launch.name;
}

}  // namespace
}  // namespace ditfleet::region
