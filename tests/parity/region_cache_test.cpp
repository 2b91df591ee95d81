// Regions and what the kernel cache has for them: without a compiler, and where it does not load.
#include <gmock/gmock.h>

#include "pipeline/region/compile/known_compiler.h"
#include "pipeline/region/key.h"
#include "pipeline/region/run/interpreter.h"
#include "shared/kernel_cache/cache.h"
#include "tests/parity/region_fixture.h"

namespace ditfleet::region {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::relative_error;

// A cache that has the programs is enough; what it lacks wants the compiler.
TEST(RegionCache, AWarmCacheNeedsNoCompiler) {
  if (auto compiler = open_cpu_jit(); !compiler) GTEST_SKIP() << compiler.error().message;
  const std::shared_ptr<kernel_cache::KernelCache> cache = make_memory_cache();
  Region("single", recipe(flux_single_block, 2, 16), make_region_host({.backend = "cpu_jit"}, kCpu, cache))
      .prepare(ElementType::kF32, kCpu);
  for (const char* backend : {"cpu_jit", "auto"}) {
    const auto without = [&](bool fullgraph) {
      return make_region_host({.backend = backend, .fullgraph = fullgraph, .cxx = "/nowhere/c++"}, kCpu, cache);
    };
    const auto strict = without(true), lenient = without(false);
    const auto run = [](const std::shared_ptr<RegionHost>& host, std::int64_t heads) {
      Region region("single", recipe(flux_single_block, heads, 16), host);
      const Program program = program_of(flux_single_block, heads, 16, ElementType::kF32);
      const auto inputs = testing::random_inputs(program, {{"batch", 1}, {"tokens", 8}}, 1);
      Outputs got;
      region.run(inputs, got);
      EXPECT_LE(relative_error(got[0], interpret(program, inputs)[0]), 2e-6);
    };
    run(strict, 2);
    EXPECT_EQ(strict->counters->counts().compiles, 1u) << "it runs compiled";
    EXPECT_EQ(strict->counters->counts().built, 0u);
    EXPECT_THAT(failure_of([&] { run(strict, 3); }),
                AllOf(HasSubstr("compile.fullgraph is set and region single"), HasSubstr("(no_compiler)"),
                      HasSubstr("the kernel cache has no program of region flux.single by "),
                      HasSubstr("/nowhere/c++ cannot be used"), HasSubstr("install g++")));
    run(lenient, 3);
    EXPECT_EQ(lenient->counters->counts().fallback_reasons.at("no_compiler"), 1u);
    EXPECT_EQ(lenient->counters->counts().compiles, 0u);
  }
  EXPECT_THAT(
      failure_of([] { make_region_host({.backend = "cpu_jit", .cxx = "/nowhere/c++"}, kCpu, make_memory_cache()); }),
      HasSubstr("/nowhere/c++ cannot be used"))
      << "a cold cache has nothing to run";
}

// A model whose blocks have room for adapters and one whose have none run the same kernels.
TEST(RegionCache, BlocksWithTheSameKernelsAreOneProgram) {
  if (auto compiler = open_cpu_jit(); !compiler) GTEST_SKIP() << compiler.error().message;
  const auto shared = make_region_host({.backend = "cpu_jit", .fullgraph = true}, kCpu, nullptr);
  for (const Make make : {flux_double_block, flux_single_block})
    for (const bool adapters : {false, true})
      Region(
          "block",
          [&](ElementType type) { return make({.heads = 2, .head_dim = 16, .type = type, .adapters = adapters}); },
          shared)
          .prepare(ElementType::kF32, kCpu);
  EXPECT_EQ(shared->counters->counts().compiles, 4u);
  EXPECT_EQ(shared->counters->counts().built, 2u);
}

// Another compiler takes the first one's place: those without one ask for what is made now.
TEST(RegionCache, TheLastCompilerIsKnown) {
  const std::shared_ptr<kernel_cache::KernelCache> cache = make_memory_cache();
  if (!compiler_key()) GTEST_SKIP() << "this processor's features are unknown";
  for (const std::string name : {"(x) 1", "(x) 2"}) {
    remember_compiler(*cache, *absent_cpu_jit(name, "cpu features", ""));
    const auto known = remembered_compiler(*cache, "there is none");
    ASSERT_TRUE(known) << known.error().message;
    EXPECT_EQ((*known)->identity(), name);
    EXPECT_EQ((*known)->target(kHostArch), "cpu features");
    EXPECT_FALSE((*known)->installed());
  }
}

// What a cache vouches for may still be no program for this machine: it is compiled anew, once for all who share the
// cache.
TEST(RegionCache, AProgramThatDoesNotLoadIsReplaced) {
  if (auto compiler = open_cpu_jit(); !compiler) GTEST_SKIP() << compiler.error().message;
  const auto shared = make_region_host({.backend = "cpu_jit", .fullgraph = true}, kCpu, nullptr);
  const Program program = program_of(flux_single_block, 2, 16, ElementType::kF32);
  const Plan plan = *fuse(program, shared->compiler->fuse_options());
  const auto key = key_of(identify(generate_cpp(plan), *shared->compiler, shared->arch));
  ASSERT_TRUE(shared->cache->get_or_compile(key, "flux.single", shared->arch, [&]() -> Result<Entry> {
    return Entry{
        .region = "flux.single", .arch = shared->arch, .kind = kernel_cache::Kind::kSharedObject, .code = "no program"};
  }));
  const auto next = make_region_host({.backend = "cpu_jit", .fullgraph = true}, kCpu, shared->cache);
  for (const auto& one : {shared, next}) {
    Region region("single", recipe(flux_single_block, 2, 16), one);
    const auto inputs = testing::random_inputs(program, {{"batch", 1}, {"tokens", 8}}, 1);
    Outputs got;
    region.run(inputs, got);
    EXPECT_LE(relative_error(got[0], interpret(program, inputs)[0]), 2e-6);
    EXPECT_EQ(one->counters->counts().compiles, 1u);
    EXPECT_EQ(one->counters->counts().built, one == shared ? 1u : 0u)
        << "the next engine finds what was compiled instead";
    EXPECT_EQ(one->counters->counts().fallbacks, 0u);
  }
  EXPECT_EQ(shared->cache->counts().refused, 1u);
}

}  // namespace
}  // namespace ditfleet::region
