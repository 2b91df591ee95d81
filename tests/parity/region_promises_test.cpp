// What regions promise beside their numbers: the checks that diffusers runs on compiled models, as far as they apply;
// modes and attention backends; options; what happens where something is missing.
#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/region/ir/builder.h"
#include "pipeline/region/libraries/direct_attention.h"
#include "pipeline/region/run/graphs.h"
#include "pipeline/region/run/interpreter.h"
#include "shared/kernel_cache/cache.h"
#include "tests/parity/region_fixture.h"
#include "tests/unit/shared/telemetry/process_metrics.h"

namespace ditfleet::region {
namespace {

using c10::ScalarType;
using testing::converted;
using ::testing::HasSubstr;
using testing::relative_error;

// --- the checks of diffusers' compile tests, one each -----------------------------------------------------------

TEST_F(RegionParity, FullGraphTwiceWithoutARecompile) {
  const auto shared = host({.fullgraph = true, .error_on_recompile = true});
  Region region("single", recipe(flux_single_block, 2, 16), shared);
  const auto inputs =
      inputs_for(program_of(flux_single_block, 2, 16, ElementType::kF32), {{"batch", 1}, {"tokens", 8}}, 1);
  Outputs first, second;
  region.run(inputs, first);
  region.run(inputs, second);
  EXPECT_TRUE(first[0].equal(second[0]));
  const auto counts = shared->counters->counts();
  EXPECT_EQ(counts.compiles, 1u);
  EXPECT_EQ(counts.hits, 1u);
  EXPECT_EQ(counts.misses, 1u);
}

TEST_F(RegionParity, RecompileLimitOfOneIsEnoughForAllCopiesOfABlock) {
  const auto shared = host({.fullgraph = true, .recompile_limit = 1});
  Region region("single", recipe(flux_single_block, 2, 16), shared);
  const Program program = program_of(flux_single_block, 2, 16, ElementType::kF32);
  for (std::uint64_t copy = 0; copy < 38; ++copy) {
    Outputs got;
    region.run(inputs_for(program, {{"batch", 1}, {"tokens", 8}}, copy), got);
  }
  EXPECT_EQ(shared->counters->counts().compiles, 1u);
  EXPECT_EQ(shared->counters->counts().hits, 37u);
}

TEST_F(RegionParity, ThreeShapesWithoutARecompile) {
  const auto shared = host({.fullgraph = true, .error_on_recompile = true, .recompile_limit = 1});
  Region region("double", recipe(flux_double_block, 2, 16), shared);
  const Program program = program_of(flux_double_block, 2, 16, ElementType::kF32);
  for (const auto& [image, batch] : {std::pair<std::int64_t, std::int64_t>{16, 1}, {36, 1}, {16, 2}}) {
    Outputs got;
    region.run(inputs_for(program, {{"batch", batch}, {"image", image}, {"text", 4}}, 2), got);
  }
  EXPECT_EQ(shared->counters->counts().recompiles, 0u);
}

// diffusers' check for each of its attention backends: the same program, no recompile, no more error.
TEST_F(RegionParity, EveryAttentionBackendRunsTheSameProgram) {
  for (const AttentionBackend backend : attention_backends()) {
    const bool gpu_only = backend == AttentionBackend::kCudnn || backend == AttentionBackend::kFlash3 ||
                          backend == AttentionBackend::kEfficient;
    if (device().is_cpu() && gpu_only) {
      EXPECT_THAT(failure_of([&] { host({.attention = std::string(name_of(backend))}); }),
                  HasSubstr("which needs a GPU, but the device is cpu"));
      continue;
    }
    if (backend == AttentionBackend::kFlash3 && !open_flash3()) continue;
    const auto shared = host({.attention = std::string(name_of(backend)),
                              .fullgraph = true,
                              .error_on_recompile = true,
                              .recompile_limit = 1});
    Region region("double", recipe(flux_double_block, 3, 64), shared);
    const Program program = program_of(flux_double_block, 3, 64, ElementType::kBF16);
    for (const std::int64_t image : {16, 40}) {
      const auto inputs = inputs_for(program, {{"batch", 2}, {"image", image}, {"text", 9}}, 5);
      Outputs got;
      region.run(inputs, got);
      const auto eager = interpret(program, inputs),
                 reference = interpret(program, converted(inputs, ScalarType::Double));
      for (std::size_t o = 0; o < got.size(); ++o)
        EXPECT_LE(relative_error(got[o], reference[o]), 1.1 * relative_error(eager[o], reference[o]))
            << name_of(backend);
    }
    EXPECT_EQ(shared->counters->counts().compiles, 1u);
  }
}

// A call is run once as it is, recorded once, then only started; with the inputs of each call, and whoever's turn it
// is.
TEST_F(RegionParity, GraphsComputeWhatTheyRecorded) {
  if (device().is_cpu()) GTEST_SKIP() << "CUDA graphs need a GPU";
  const auto graphs = make_graphs(device(), 2);
  if (!graphs) GTEST_SKIP() << "this build lacked CUDA's headers";
  int bodies = 0;
  const auto body = [&](const std::vector<at::Tensor>& in) {
    ++bodies;
    return at::matmul(in[0], in[1]) + in[0];
  };
  std::vector<at::Tensor> wanted, got;
  for (int call = 0; call < 5; ++call)
    for (const std::int64_t n : {8, 72}) {
      const auto options = at::TensorOptions(ScalarType::Float).device(device());
      const at::Tensor a = at::randn({n, n}, options), b = at::randn({n, n}, options);
      wanted.push_back(at::matmul(a, b) + a);
      got.push_back(graphs->run({n}, {a, b}, body));
    }
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_LE(relative_error(got[i], wanted[i]), 1e-6) << "call " << i;
  EXPECT_EQ(bodies, 4) << "each of two buckets as it is, then recorded";
  const at::Tensor x = at::randn({3, 3}, at::TensorOptions(ScalarType::Float).device(device()));
  for (int call = 0; call < 3; ++call)
    EXPECT_LE(relative_error(graphs->run({3}, {x, x}, body), at::matmul(x, x) + x), 1e-6);
  EXPECT_EQ(bodies, 6) << "a third bucket takes the place of the one that was used least lately";
}

TEST_F(RegionParity, WhatCannotBeRecordedRunsAsItIs) {
  if (device().is_cpu()) GTEST_SKIP() << "CUDA graphs need a GPU";
  const auto graphs = make_graphs(device(), 2);
  if (!graphs) GTEST_SKIP() << "this build lacked CUDA's headers";
  const at::Tensor x = at::randn({4}, at::TensorOptions(ScalarType::Float).device(device()));
  for (int call = 0; call < 4; ++call)
    EXPECT_LE(
        relative_error(
            graphs->run({4}, {x}, [](const std::vector<at::Tensor>& in) { return in[0] * in[0].sum().item<float>(); }),
            x * x.sum()),
        1e-6);
}

// cuBLASLt's products, with their epilogues.
TEST_F(RegionParity, ProductsErrNoMore) {
  if (device().is_cpu()) GTEST_SKIP() << "cuBLASLt needs a GPU";
  const auto shared = host({.fullgraph = true});
  for (const ElementType type : {ElementType::kBF16, ElementType::kF32}) {
    Region region("single", recipe(flux_single_block, 4, 64), shared);
    const Program program = program_of(flux_single_block, 4, 64, type);
    const auto inputs = inputs_for(program, {{"batch", 2}, {"tokens", 300}}, 6);
    const auto eager = interpret(program, inputs),
               reference = interpret(program, converted(inputs, ScalarType::Double));
    for (int call = 0; call < 2; ++call) {
      Outputs got;
      region.run(inputs, got);
      EXPECT_LE(relative_error(got[0], reference[0]), std::max(2e-6, 1.1 * relative_error(eager[0], reference[0])));
    }
  }
}

// --- what the options promise ---------------------------------------------------------------------------------

double recompiles() { return ditfleet::testing::series("ditfleet_recompiles_total").value_or(0); }

TEST_F(RegionParity, WithoutDynamicEachSizeIsAProgram) {
  const double before = recompiles();
  const auto shared = host({.dynamic = false, .recompile_limit = 2});
  Region region("single", recipe(flux_single_block, 2, 16), shared);
  const Program program = program_of(flux_single_block, 2, 16, ElementType::kF32);
  for (std::int64_t tokens : {4, 5, 4, 6}) {
    const auto inputs = inputs_for(program, {{"batch", 1}, {"tokens", tokens}}, 2);
    Outputs got;
    region.run(inputs, got);
    EXPECT_LE(relative_error(got[0], interpret(program, inputs)[0]), 2e-6);
  }
  const auto counts = shared->counters->counts();
  EXPECT_EQ(counts.compiles, 2u);
  EXPECT_EQ(counts.built, 1u) << "sizes are arguments of the kernels, which are the same";
  EXPECT_GT(counts.compile_us, 1000u) << "a compiler takes longer";
  EXPECT_EQ(counts.recompiles, 1u);
  EXPECT_EQ(recompiles(), before + 1);
  EXPECT_EQ(counts.fallback_reasons.at("recompile_limit"), 1u) << "the third size runs eagerly";
}

TEST_F(RegionParity, ErrorOnRecompileNamesTheGuard) {
  Region region("flux.single", recipe(flux_single_block, 2, 16), host({.dynamic = false, .error_on_recompile = true}));
  const Program program = program_of(flux_single_block, 2, 16, ElementType::kF32);
  Outputs got;
  region.run(inputs_for(program, {{"batch", 1}, {"tokens", 4}}, 2), got);
  EXPECT_THAT(failure_of([&] {
                region.run(inputs_for(program, {{"batch", 1}, {"tokens", 5}}, 2), got);
              }),
              HasSubstr("region flux.single would be compiled again: with compile.dynamic off sizes were batch 1, "
                        "tokens 4 and are batch 1, tokens 5"));
}

TEST_F(RegionParity, AnotherElementTypeIsAnotherProgram) {
  const double before = recompiles();
  const auto shared = host();
  Region region("flux.single", recipe(flux_single_block, 2, 16), shared);
  ::testing::internal::CaptureStdout();  // where the log goes that nobody has configured
  for (ElementType type : {ElementType::kF32, ElementType::kBF16, ElementType::kF32}) {
    Outputs got;
    region.run(inputs_for(program_of(flux_single_block, 2, 16, type), {{"batch", 1}, {"tokens", 4}}, 2), got);
  }
  const std::string log = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(log,
              ::testing::AllOf(HasSubstr("[warning]"),
                               HasSubstr("region flux.single is compiled again: activations were f32 and are bf16")));
  EXPECT_EQ(log.find("compiled again"), log.rfind("compiled again")) << "once: the first type's program is still there";
  EXPECT_EQ(shared->counters->counts().compiles, 2u);
  EXPECT_EQ(shared->counters->counts().recompiles, 1u);
  EXPECT_EQ(recompiles(), before + 1);
}

// A block with an op that no kernel has.
Result<Program> exact_gelu(const BlockShape& s) {
  Builder b("exact", s.type);
  return b.finish({b.gelu_erf("y", b.activation("x", {Dim::symbol("rows"), s.width()}))});
}

TEST_F(RegionParity, AnUnsupportedOpRunsEagerlyAndIsCounted) {
  const auto shared = host();
  Region region("exact", recipe(exact_gelu, 1, 8), shared);
  const Program program = program_of(exact_gelu, 1, 8, ElementType::kF32);
  const auto inputs = inputs_for(program, {{"rows", 3}}, 1);
  Outputs got;
  region.run(inputs, got);
  EXPECT_TRUE(got[0].equal(interpret(program, inputs)[0]));
  EXPECT_EQ(shared->counters->counts().fallback_reasons.at("unsupported_op"), 1u);
  EXPECT_EQ(shared->counters->counts().compiles, 0u);
}

TEST_F(RegionParity, AnUnsupportedOpIsAnErrorUnderFullGraph) {
  Region region("exact", recipe(exact_gelu, 1, 8), host({.fullgraph = true}));
  EXPECT_THAT(failure_of([&] { region.prepare(ElementType::kF32, device()); }),
              HasSubstr("[exact] y = gelu_erf: no generated kernel has this op"));
}

TEST_F(RegionParity, WrongInputsAreNamed) {
  Region region("single", recipe(flux_single_block, 2, 16), host());
  const Program program = program_of(flux_single_block, 2, 16, ElementType::kF32);
  const auto good = inputs_for(program, {{"batch", 1}, {"tokens", 8}}, 1);
  Outputs got;
  auto few = good;
  few.pop_back();
  EXPECT_THAT(failure_of([&] { region.run(few, got); }), HasSubstr("[flux.single] has 12 inputs; it must have 13"));
  auto shape = good;
  shape[1] = shape[1].narrow(0, 0, 7);
  EXPECT_THAT(failure_of([&] { region.run(shape, got); }),
              HasSubstr("%rope is [7, 16]; it must be [tokens, 16], whose tokens is 8"));
  auto type = good;
  type[5] = type[5].to(ScalarType::BFloat16);
  EXPECT_THAT(failure_of([&] { region.run(type, got); }), HasSubstr("it must be f32"));
  auto missing = good;
  missing[4] = at::Tensor();
  EXPECT_THAT(failure_of([&] { region.run(missing, got); }), HasSubstr("%gate is missing"));
  auto wide = good;
  wide[0] = wide[0].to(ScalarType::Double);
  EXPECT_THAT(failure_of([&] { region.run(wide, got); }), HasSubstr("activations are Double"));
}

TEST_F(RegionParity, RegionsShareACompiledProgramThroughTheCache) {
  const auto cache = make_memory_cache();
  const std::string backend = device().is_cpu() ? "cpu_jit" : "nvrtc";
  const auto compiles = [&] {
    return ditfleet::testing::series("ditfleet_region_compiles_total", {"reason=\"first\"", backend}).value_or(0);
  };
  for (const bool first : {true, false}) {
    const auto shared = make_region_host({.backend = backend}, device(), cache);
    Region region("single", recipe(flux_single_block, 2, 24), shared);
    const double before = compiles();
    region.prepare(ElementType::kF32, device());
    EXPECT_EQ(compiles() - before, first ? 1 : 0) << "what the cache had was counted as a compile";
    EXPECT_EQ(shared->counters->counts().compiles, 1u) << "each engine takes the program once";
    EXPECT_EQ(shared->counters->counts().built, first ? 1u : 0u);
  }
}

TEST(RegionBackend, AnEngineShowsItsCountersFromTheStart) {
  const auto engine = pipeline::Engine::create({.device = "cpu"}, {&pipeline::flux_family()});
  ASSERT_TRUE(engine.ok()) << engine.error().message;
  EXPECT_EQ(ditfleet::testing::series("ditfleet_region_compiles_total", {"\"eager\"", "\"first\""}), 0);
  EXPECT_TRUE(ditfleet::testing::series("ditfleet_recompiles_total").has_value());
  EXPECT_EQ(ditfleet::testing::series("ditfleet_region_fallbacks_total", {"\"adapters\""}), 0);
}

TEST(RegionBackend, AMissingOneIsAClearError) {
  ::setenv("DITFLEET_CXX", "/nowhere/c++", 1);
  EXPECT_THAT(failure_of([] { make_region_host({.backend = "cpu_jit"}, kCpu, nullptr); }),
              HasSubstr("/nowhere/c++ cannot be used"));
  EXPECT_EQ(make_region_host({.backend = "auto"}, kCpu, nullptr)->compiler, nullptr) << "auto does without";
  EXPECT_EQ(make_region_host({.backend = "auto"}, kCpu, nullptr)->counters->counts().fallback_reasons.at("no_compiler"),
            1u);
  ::unsetenv("DITFLEET_CXX");
  EXPECT_THAT(failure_of([] { make_region_host({.backend = "nvrtc"}, kCpu, nullptr); }),
              HasSubstr("the device is cpu"));
  EXPECT_THAT(failure_of([] { make_region_host({.backend = "cpu_jit", .cxx = "/elsewhere/c++"}, kCpu, nullptr); }),
              HasSubstr("/elsewhere/c++ cannot be used"));
  EXPECT_THAT(
      failure_of([] { make_region_host({.backend = "cpu_jit", .fullgraph = true, .vae = true}, kCpu, nullptr); }),
      HasSubstr("on a CPU the VAE runs eagerly"));
}

// A compiler that answers for its version and fails as long as a file is there.
class FailingCompiler {
 public:
  FailingCompiler() {
    write(path_, "#!/bin/sh\ncase \"$*\" in *--version*|*--help=target*) echo failing 1.0; exit 0;; esac\ntest -e '" +
                     path_ + ".on' || exec c++ \"$@\"\necho 'error: no'; exit 1\n");
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all);
    write(path_ + ".on", "");
    ::setenv("DITFLEET_CXX", path_.c_str(), 1);
  }
  ~FailingCompiler() {
    ::unsetenv("DITFLEET_CXX");
    recover();
    std::filesystem::remove(path_);
    for (const auto& file :
         std::filesystem::directory_iterator(std::filesystem::temp_directory_path()))  // what the compiler refused
      if (file.path().filename().string().rfind("ditfleet-flux.single-", 0) == 0) std::filesystem::remove(file.path());
  }
  void recover() { std::filesystem::remove(path_ + ".on"); }

 private:
  static void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }
  const std::string path_ = ::testing::TempDir() + "/ditfleet-failing-cxx";
};

TEST(RegionBackend, ACompilerThatFailsLeavesTheRegionToEager) {
  const FailingCompiler compiler;
  const auto shared = make_region_host({.backend = "cpu_jit"}, kCpu, nullptr);
  Region region("single", recipe(flux_single_block, 2, 16), shared);
  const Program program = program_of(flux_single_block, 2, 16, ElementType::kF32);
  const auto inputs = testing::random_inputs(program, {{"batch", 1}, {"tokens", 8}}, 1);
  Outputs got;
  region.run(inputs, got);
  EXPECT_TRUE(got[0].equal(interpret(program, inputs)[0]));
  EXPECT_EQ(shared->counters->counts().fallback_reasons.at("compile_error"), 1u);
  Region strict("single", recipe(flux_single_block, 2, 16),
                make_region_host({.backend = "cpu_jit", .fullgraph = true}, kCpu, nullptr));
  EXPECT_THAT(failure_of([&] { strict.prepare(ElementType::kF32, kCpu); }),
              HasSubstr("error: no; the source is saved in "));
}

// What was in a compiler's way may pass: it is asked again after a pause, not at every call, and not for another size
// either.
TEST(RegionBackend, ACompilerThatFailedIsAskedAgainLater) {
  FailingCompiler compiler;
  const auto shared = make_region_host({.backend = "cpu_jit"}, kCpu, nullptr);
  auto now = std::chrono::steady_clock::time_point();
  shared->now = [&] { return now; };
  Region region("single", recipe(flux_single_block, 2, 16), shared);
  const auto run = [&](ElementType type, std::int64_t tokens) {
    Outputs got;
    region.run(
        testing::random_inputs(program_of(flux_single_block, 2, 16, type), {{"batch", 1}, {"tokens", tokens}}, 1), got);
  };
  const auto failures = [&] { return shared->cache->counts().failed_compiles; };
  run(ElementType::kF32, 8);
  run(ElementType::kF32, 9);
  run(ElementType::kBF16, 9);
  region.prepare(ElementType::kF32, kCpu);
  EXPECT_EQ(failures(), 1u) << "once, whoever asks";
  now += std::chrono::seconds(31);
  run(ElementType::kF32, 8);
  EXPECT_EQ(failures(), 2u);
  compiler.recover();
  now += std::chrono::seconds(31);
  run(ElementType::kF32, 8);
  EXPECT_EQ(shared->counters->counts().compiles, 0u) << "the second pause is twice as long";
  now += std::chrono::seconds(30);
  run(ElementType::kF32, 8);
  run(ElementType::kF32, 9);
  run(ElementType::kBF16, 9);
  EXPECT_EQ(failures(), 2u);
  EXPECT_EQ(shared->counters->counts().compiles, 2u) << "one for each element type";
}

TEST(RegionBackend, PausesGrow) {
  using std::chrono::seconds;
  EXPECT_EQ(pause_after(1, seconds(0)), seconds(30));
  EXPECT_EQ(pause_after(3, seconds(0)), seconds(120));
  EXPECT_EQ(pause_after(1, seconds(60)), seconds(600))
      << "a compiler that hangs holds calls up for a tenth of the time at most";
  EXPECT_EQ(pause_after(1000, seconds(0)), std::chrono::hours(1));
}

}  // namespace
}  // namespace ditfleet::region
