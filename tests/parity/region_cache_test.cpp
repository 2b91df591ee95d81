// Regions and the kernel cache: shared programs, and programs that do not load.

#include "pipeline/region/key.h"
#include "pipeline/region/run/interpreter.h"
#include "shared/kernel_cache/cache.h"
#include "tests/parity/region_fixture.h"

namespace ditfleet::region {
namespace {

using testing::relative_error;

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
