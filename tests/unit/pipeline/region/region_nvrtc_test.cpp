// Every region of FLUX and Wan through NVRTC: a cubin for each architecture, no spilled register, the same bytes from
// process to process. Needs no GPU; skipped where libnvrtc.so.13 is not there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <thread>

#include "pipeline/families/flux/block_programs.h"
#include "pipeline/families/wan/block_program.h"
#include "pipeline/region/compile/cached.h"
#include "pipeline/region/compile/nvrtc.h"
#include "pipeline/region/ir/builder.h"
#include "pipeline/region/key.h"
#include "pipeline/region/programs/channels_last_source.h"
#include "pipeline/region/programs/dequantize_source.h"
#include "pipeline/region/programs/f8_heads_source.h"
#include "pipeline/region/programs/matrix_copies_source.h"
#include "shared/core/bytes.h"
#include "shared/kernel_cache/cache.h"
#include "tests/programs.h"
#include "tests/unit/pipeline/region/region_temporal_block.h"

// NVRTC keeps what it allocates; the leak checker need not tell.
extern "C" const char* __lsan_default_suppressions() { return "leak:libnvrtc\n"; }

namespace ditfleet::region {
namespace {

using ::testing::HasSubstr;

const BlockShape kFlux{.heads = 24, .head_dim = 128, .type = ElementType::kBF16};

const BlockShape kAdapted{.heads = 24, .head_dim = 128, .type = ElementType::kBF16, .adapters = true};

// Blocks of this shape with quantized linears: computed in fp8, or dequantized ahead of the products.
BlockShape with_weights(const BlockShape& shape, std::size_t linears, Builder::Weight weight) {
  BlockShape made = shape;
  made.weights.assign(linears, weight);
  return made;
}

constexpr auto kF8 = Builder::Weight::kF8, kWide = Builder::Weight::kWide;
constexpr std::size_t kDouble = kDoubleLinears.size(), kSingle = kSingleLinears.size();

// Wan 2.2 A14B.
WanBlockShape wan(std::optional<Builder::Weight> weight = {}, bool adapters = false) {
  WanBlockShape shape{.heads = 40, .head_dim = 128, .ffn = 13824, .type = ElementType::kBF16, .adapters = adapters};
  if (weight) shape.weights.assign(kWanLinears.size(), *weight);
  return shape;
}
// Wan 2.1 image to video.
WanBlockShape with_image(WanBlockShape shape) {
  shape.image = true;
  return shape;
}
// Wan 2.2 TI2V-5B.
WanBlockShape ti2v(std::optional<Builder::Weight> weight = {}, bool adapters = false) {
  WanBlockShape shape = wan(weight, adapters);
  shape.heads = 24;
  shape.ffn = 14336;
  shape.still = true;
  return shape;
}

std::shared_ptr<const Compiler> compiler() {
  static const auto opened = open_nvrtc();
  return opened ? *opened : nullptr;
}

// As a worker on a GPU has it.
Source source_of(const Result<Program>& program) {
  EXPECT_TRUE(program);
  return program ? generate_cuda(*fuse(*program, compiler()->fuse_options())) : Source{};
}

// Widths that neither 8 nor 4 divides, as a model with heads of 126 has them: norms of two streams each.
Result<Program> norms_of_odd_widths() {
  Builder b("norms", ElementType::kBF16);
  std::vector<Builder::Ref> made;
  for (const std::int64_t width : {34, 126, 250})
    for (const char* stream : {"image", "text"}) {
      const std::string name = stream + std::to_string(width);
      const auto table = [&](const char* what) {
        return b.table(name + what, ElementType::kBF16, {Dim::symbol("batch"), 1, width});
      };
      const auto x = b.activation(name, {Dim::symbol("batch"), Dim::symbol(stream), width});
      made.push_back(b.modulate(name + ".y", b.layer_norm(name + ".n", x, 1e-6), table(".scale"), table(".shift")));
    }
  return b.finish(made);
}

// Every program of workers and those above; blocks whose source is another's are that other's program.
const std::vector<std::pair<std::string, Source>>& programs() {
  static const auto all = [] {
    std::vector<std::pair<std::string, Source>> made{
        {"flux.double", source_of(flux_double_block(kFlux))},
        {"flux.single", source_of(flux_single_block(kFlux))},
        {"flux.double adapted", source_of(flux_double_block(kAdapted))},
        {"flux.single adapted", source_of(flux_single_block(kAdapted))},
        {"fp8 double", source_of(flux_double_block(with_weights(kFlux, kDouble, kF8)))},
        {"fp8 single", source_of(flux_single_block(with_weights(kFlux, kSingle, kF8)))},
        {"fp8 double adapted", source_of(flux_double_block(with_weights(kAdapted, kDouble, kF8)))},
        {"fp8 single adapted", source_of(flux_single_block(with_weights(kAdapted, kSingle, kF8)))},
        {"NF4 double adapted", source_of(flux_double_block(with_weights(kAdapted, kDouble, kWide)))},
        {"NF4 single adapted", source_of(flux_single_block(with_weights(kAdapted, kSingle, kWide)))},
        {"wan", source_of(wan_block(wan()))},
        {"fp8 wan", source_of(wan_block(wan(kF8)))},
        {"NF4 wan", source_of(wan_block(wan(kWide)))},
        {"wan adapted", source_of(wan_block(wan({}, true)))},
        {"NF4 in bf16 wan adapted", source_of(wan_block(wan(Builder::Weight::kApart, true)))},
        {"fp8 wan adapted", source_of(wan_block(wan(kF8, true)))},
        {"NF4 wan adapted", source_of(wan_block(wan(kWide, true)))},
        {"wan still", source_of(wan_block(ti2v()))},
        {"fp8 wan still", source_of(wan_block(ti2v(kF8)))},
        {"wan still adapted", source_of(wan_block(ti2v({}, true)))},
        {"wan image", source_of(wan_block(with_image(wan())))},
        {"fp8 wan image", source_of(wan_block(with_image(wan(kF8))))},
        {"wan image adapted", source_of(wan_block(with_image(wan({}, true))))},
        {"fp8 wan still adapted", source_of(wan_block(ti2v(kF8, true)))},
        {"dequantize", dequantize_program().source},
        {"GGUF", gguf_program().source},
        {"fp8 heads", f8_heads_program().source},
        {"odd widths", source_of(norms_of_odd_widths())},
        {"matrix_copies", matrix_copies_program().source},
        {"channels_last", channels_last_program().source}};
    std::set<std::string> texts;
    std::erase_if(made, [&](const auto& one) { return !texts.insert(one.second.text).second; });
    return made;
  }();
  return all;
}

Result<std::shared_ptr<const Entry>> compiled(const std::string& name, const Source& source, const std::string& arch) {
  auto made = compile_cached(*testing::shared_programs(), key_of(identify(source, *compiler(), arch)), name, source,
                             *compiler(), arch);
  if (!made) return made.error();
  return std::move(made->entry);
}

class RegionNvrtc : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!compiler()) GTEST_SKIP() << open_nvrtc().error().message;
  }
};

class RegionCubin : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!compiler()) GTEST_SKIP() << open_nvrtc().error().message;
  }
};

TEST_P(RegionCubin, HasEveryKernelWithoutSpills) {
  for (const auto& [name, source] : programs()) {
    SCOPED_TRACE(name);
    if (name.starts_with("fp8") && (GetParam() == "sm_80" || GetParam() == "sm_86")) continue;  // no fp8 products
    const auto made = compiled("region", source, GetParam());
    ASSERT_TRUE(made) << made.error().message;
    const Entry& program = **made;
    EXPECT_EQ(program.code.substr(0, 4),
              "\x7f"
              "ELF");
    std::size_t functions = 0;
    for (const auto& kernel : source.kernels) functions += function_names(kernel).size();
    EXPECT_EQ(program.kernels.size(), functions);
    EXPECT_EQ(program.source_bytes, source.text.size());
    for (const auto& kernel : program.kernels) {
      EXPECT_EQ(kernel.spill_bytes, 0u) << kernel.name;
      EXPECT_GT(kernel.registers, 8u) << kernel.name;
      EXPECT_LE(kernel.registers, 255u) << kernel.name;
      ASSERT_EQ(kernel.parameter_bytes.size(), 1u) << kernel.name;
      EXPECT_GT(kernel.parameter_bytes[0], 0u) << kernel.name;
      EXPECT_NE(program.code.find(kernel.name), std::string::npos) << kernel.name << " is not in the cubin";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, RegionCubin, ::testing::ValuesIn(gpu_architectures()),
                         [](const auto& info) { return info.param; });

// Odd widths, widths that no vector divides, the demo's and the temporal block, both element types.
TEST_F(RegionNvrtc, BuildsBlocksOfOtherSizes) {
  for (ElementType type : {ElementType::kF32, ElementType::kBF16})
    for (const auto& [heads, head_dim] : {std::pair<std::int64_t, std::int64_t>{6, 32}, {1, 2}, {3, 10}}) {
      const BlockShape shape{.heads = heads, .head_dim = head_dim, .type = type};
      for (const auto& program : {flux_single_block(shape), temporal_block(shape)}) {
        ASSERT_TRUE(program);
        const auto made = compiled(program->block, source_of(program), "sm_80");
        ASSERT_TRUE(made) << made.error().message;
        for (const auto& kernel : (*made)->kernels) EXPECT_EQ(kernel.spill_bytes, 0u) << kernel.name;
      }
    }
}

// At these widths ptxas, left to itself, spilled to have more blocks on a multiprocessor of an A100.
TEST_F(RegionNvrtc, AKernelThatSpillsIsGivenRoom) {
  for (const auto& [heads, head_dim] : {std::pair<std::int64_t, std::int64_t>{56, 64}, {40, 96}}) {
    const auto program = flux_single_block({.heads = heads, .head_dim = head_dim, .type = ElementType::kBF16});
    const auto made = compiled(program->block, source_of(program), "sm_80");
    ASSERT_TRUE(made) << made.error().message;
    for (const auto& kernel : (*made)->kernels) EXPECT_EQ(kernel.spill_bytes, 0u) << kernel.name;
  }
}

// Of the source of every program, and of the cubins of one program of each kind.
std::string digests() {
  std::string text;
  for (const auto& [name, source] : programs()) {
    text += name + " " + sha256_hex(source.text) + "\n";
    if (!std::set<std::string>{"flux.double", "fp8 wan adapted", "dequantize", "t5", "channels_last"}.contains(name))
      continue;
    const auto compiled = compiler()->compile("region", source, "sm_90a");
    text += (compiled ? sha256_hex(compiled->code) : compiled.error().message) + "\n";
  }
  return text;
}

// Of a small program for those whose compiler has another back end.
std::string small_digests() {
  std::string text;
  for (const std::string arch : {"sm_100a", "sm_120a"}) {
    const auto compiled = compiler()->compile("copies", matrix_copies_program().source, arch);
    text += arch + " " + (compiled ? sha256_hex(compiled->code) : compiled.error().message) + "\n";
  }
  return text;
}

// Run in a process of their own by the tests below; they write what they made.
TEST_F(RegionNvrtc, DISABLED_DigestOfAnotherProcess) {
  const char* file = std::getenv("DITFLEET_TEST_DIGEST");
  ASSERT_TRUE(file) << "runs as a child of BytesAreTheSameInEveryProcess";
  std::ofstream(file) << digests();
}

TEST_F(RegionNvrtc, DISABLED_SmallDigestOfAnotherProcess) {
  const char* file = std::getenv("DITFLEET_TEST_DIGEST");
  ASSERT_TRUE(file) << "runs as a child of BytesAreTheSameWhereverMemoryLies";
  std::ofstream(file) << small_digests();
}

std::string digests_of_another_process(const std::string& test) {
  const std::string file =
      (std::filesystem::temp_directory_path() / ("ditfleet-digest-" + std::to_string(::getpid()))).string();
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string command = "DITFLEET_TEST_DIGEST=" + file + " '" + self +
                              "' --gtest_also_run_disabled_tests --gtest_filter=RegionNvrtc." + test +
                              " >/dev/null 2>&1";
  EXPECT_EQ(std::system(command.c_str()), 0);
  const auto theirs = read_file(file);
  std::filesystem::remove(file);
  return theirs ? *theirs : theirs.error().message;
}

TEST_F(RegionNvrtc, BytesAreTheSameInEveryProcess) {
  const std::string theirs = digests_of_another_process("DISABLED_DigestOfAnotherProcess");
  EXPECT_GT(theirs.size(), (programs().size() + 5) * 65);
  EXPECT_EQ(digests(), theirs);
}

// Each process has its memory elsewhere, and a split compilation for Blackwell made one of two cubins of it.
TEST_F(RegionNvrtc, BytesAreTheSameWhereverMemoryLies) {
  const std::string ours = small_digests();
  for (int process = 0; process < 8; ++process)
    ASSERT_EQ(digests_of_another_process("DISABLED_SmallDigestOfAnotherProcess"), ours);
}

TEST_F(RegionNvrtc, KeepsTheSourceThatDoesNotCompile) {
  Source broken;
  broken.text = "extern \"C\" __global__ void f() { this is no program }\n";
  const auto compiled = compiler()->compile("broken", broken, "sm_80");
  ASSERT_FALSE(compiled);
  EXPECT_THAT(compiled.error().message, HasSubstr("[nvrtc] region broken for sm_80: NVRTC_ERROR_COMPILATION"));
  std::smatch kept;
  ASSERT_TRUE(std::regex_search(compiled.error().message, kept, std::regex("saved in (\\S+)")))
      << compiled.error().message;
  EXPECT_EQ(*read_file(kept[1]), broken.text);
  std::filesystem::remove(kept[1].str());
}

TEST_F(RegionNvrtc, ManyThreadsCompileAtOnce) {
  const Source source = source_of(temporal_block({.heads = 2, .head_dim = 16, .type = ElementType::kBF16}));
  std::vector<std::string> codes(4);
  std::vector<std::thread> threads;
  for (auto& code : codes)
    threads.emplace_back([&] {
      if (auto compiled = compiler()->compile("temporal", source, "sm_80")) code = compiled->code;
    });
  for (auto& thread : threads) thread.join();
  EXPECT_FALSE(codes[0].empty());
  for (const auto& code : codes) EXPECT_EQ(code, codes[0]);
}

TEST(RegionPtxasLog, IsRead) {
  std::vector<KernelInfo> kernels(2);
  kernels[0].name = "a_i32_v";
  kernels[1].name = "b_i64_s";
  read_ptxas_log(
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'b_i64_s' for 'sm_90a'\n"
      "ptxas info    : Function properties for b_i64_s\n"
      "    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
      "ptxas info    : Used 255 registers, used 1 barriers, 128 bytes smem, 960 bytes cmem[0]\n"
      "ptxas info    : Compiling entry function 'other' for 'sm_90a'\n"
      "ptxas info    : Used 7 registers, 520 bytes cmem[0]\n"
      "ptxas info    : Compiling entry function 'a_i32_v' for 'sm_90a'\n"
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 40 registers, 520 bytes cmem[0]\n",
      kernels);
  EXPECT_EQ(kernels[0].registers, 40u);
  EXPECT_EQ(kernels[0].spill_bytes, 0u);
  EXPECT_EQ(kernels[0].shared_bytes, 0u);
  EXPECT_EQ(kernels[1].registers, 255u);
  EXPECT_EQ(kernels[1].spill_bytes, 20u);
  EXPECT_EQ(kernels[1].shared_bytes, 128u);
}

}  // namespace
}  // namespace ditfleet::region
