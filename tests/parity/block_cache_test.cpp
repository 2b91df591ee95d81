// Requests with skipped blocks, compared with diffusers' first-block cache: tests/fixtures/cache/make.py.
// DITFLEET_TEST_COMPILE and DITFLEET_TEST_DEVICE run the same with compiled blocks and on a GPU.
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <thread>

#include "pipeline/device/failure.h"
#include "pipeline/engine/network.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/wan/wan.h"
#include "pipeline/parallel/shared_memory.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

struct Sample {
  std::string set, name;  // of tests/fixtures/cache
  std::string folder;     // of tests/fixtures/SET
};

struct Drawn {
  at::Tensor latents;
  std::vector<std::uint8_t> skipped;  // by step
};

Drawn draw(const Sample& sample, const GenerationRequest& request, EngineOptions options, std::string quantize = {}) {
  options.lora_slots = request.loras.empty() ? 0 : 1;
  const auto engine = unwrap(Engine::create(options, {&flux_family(), &wan_family()}));
  ModelSource source{"m", golden::Case{sample.folder, {}, sample.set}.model_dir()};
  if (!quantize.empty()) source.quantize["transformer"] = quantize;
  const auto model = unwrap(engine->load_model(source));
  const auto generation = unwrap(model->encode(request));
  Drawn drawn;
  unwrap(model->denoise(*generation, [&](const StepProgress& progress) {
    drawn.skipped.push_back(progress.skipped);
    EXPECT_TRUE(progress.preview());
    return true;
  }));
  EXPECT_EQ(generation->skipped_steps(), std::accumulate(drawn.skipped.begin(), drawn.skipped.end(), 0));
  const std::string dump = ::testing::TempDir() + "cache-" + sample.set + sample.name + ".safetensors";
  unwrap(generation->dump(dump));
  drawn.latents = golden::read_tensor(dump, "latents");
  return drawn;
}

class BlockCacheRuns : public ::testing::TestWithParam<Sample> {};

TEST_P(BlockCacheRuns, SkipWhatDiffusersSkips) {
  const golden::Golden golden = golden::load({GetParam().set, GetParam().name, "cache"});
  const Drawn drawn = draw(GetParam(), golden.request, golden::test_options(golden.bf16 ? "bf16" : "fp32", 1));
  const at::Tensor want = golden.tensor("skipped");
  const auto* skipped = want.const_data_ptr<std::uint8_t>();
  EXPECT_EQ(drawn.skipped, std::vector<std::uint8_t>(skipped, skipped + want.numel()));
  const double apart = golden::distance(drawn.latents, golden.tensor("latents"));
  std::printf("%s/%s: %.2g apart\n", GetParam().set.c_str(), GetParam().name.c_str(), apart);
  EXPECT_LE(apart, golden.bf16 ? 4e-2 : 2e-4);
}

INSTANTIATE_TEST_SUITE_P(Cases, BlockCacheRuns,
                         ::testing::Values(Sample{"flux", "plain", "dev"}, Sample{"flux", "guided", "dev"},
                                           Sample{"flux", "single", "single"}, Sample{"flux", "double", "double"},
                                           Sample{"flux", "bf16", "dev"}, Sample{"wan", "guided", "one"},
                                           Sample{"wan", "experts", "two"}, Sample{"wan", "bf16", "one"},
                                           Sample{"wan", "image", "ti2v"}),
                         [](const auto& info) { return info.param.set + "_" + info.param.name; });

// The cache keeps tensors that blocks would otherwise overwrite.
TEST(BlockCacheRun, ThatSkipsNothingDrawsWhatARunWithoutDraws) {
  for (const Sample& sample :
       {Sample{"flux", "guided", "dev"}, Sample{"flux", "single", "single"}, Sample{"wan", "experts", "two"}}) {
    GenerationRequest request = golden::load({sample.set, sample.name, "cache"}).request;
    request.fields.set("num_inference_steps", std::int64_t{4});
    const std::string adapter = sample.folder == "dev"   ? "lora/adapters/all"
                                : sample.folder == "two" ? "wan/lora/adapters/peft"
                                                         : "";
    if (!adapter.empty()) request.loras = {{(golden::fixtures() / (adapter + ".safetensors")).string(), 0.8}};
    request.fields.set("cache", job::kLeastCacheThreshold);
    const Drawn cached = draw(sample, request, golden::test_options("fp32", 1));
    request.fields.set("cache", 0.0);
    const Drawn plain = draw(sample, request, golden::test_options("fp32", 1));
    EXPECT_EQ(cached.skipped, std::vector<std::uint8_t>(4, 0)) << sample.folder;
    EXPECT_TRUE(cached.latents.equal(plain.latents)) << sample.folder;
  }
}

TEST(BlockCacheRun, DrawsTheSameWhileBlocksLeaveTheDevice) {
  for (const Sample& sample : {Sample{"flux", "plain", "dev"}, Sample{"wan", "experts", "two"}}) {
    const GenerationRequest request = golden::load({sample.set, sample.name, "cache"}).request;
    EngineOptions options = golden::test_options("fp32", 1);
    const Drawn resident = draw(sample, request, options, "nf4");
    options.memory.offload = "block";
    const Drawn moving = draw(sample, request, options, "nf4");
    EXPECT_EQ(moving.skipped, resident.skipped);
    EXPECT_TRUE(moving.latents.equal(resident.latents)) << sample.folder;
  }
}

TEST(BlockCacheRun, IsPlannedWithTheTensorsOfTheCaches) {
  for (const auto& [sample, tensor] : {std::pair(Sample{"flux", "guided", "dev"}, 4 * 3 * 24 * 4),
                                       {Sample{"wan", "guided", "one"}, 3 * 2 * 3 * 24 * 4}}) {
    GenerationRequest request = golden::load({sample.set, sample.name, "cache"}).request;
    const auto engine = unwrap(Engine::create(golden::test_options("fp32", 1), {&flux_family(), &wan_family()}));
    const ModelSource source{"m", golden::Case{sample.folder, {}, sample.set}.model_dir()};
    const auto cached = unwrap(engine->plan(source, request)).needs.denoise;
    request.fields.set("cache", 0.0);
    const auto plain = unwrap(engine->plan(source, request)).needs.denoise;
    EXPECT_GE(cached - plain, 2 * 2 * tensor) << "two of each prompt; " << sample.set;
    EXPECT_LE(cached - plain, 8 * 2 * tensor) << sample.set;
  }
}

TEST(BlockCache, ComparesWithTheLastForwardThatRanAllBlocks) {
  BlockCache cache(0.1);
  const auto tensor = [](double value) { return at::ones({1, 2, 3}) * value; };
  // The first block adds `added` to zeros.
  const auto skips = [&](double added, double* out = nullptr) {
    at::Tensor after = tensor(added);
    const bool skipped = cache.skips(tensor(0), after, nullptr);
    if (!skipped) cache.finish(after + 5);
    if (out) *out = after.mean().item<double>();
    return skipped;
  };
  EXPECT_FALSE(skips(1));
  EXPECT_TRUE(skips(1.08));
  double out = 0;
  EXPECT_TRUE(skips(0.95, &out)) << "compared with 1.08, it would not";
  EXPECT_NEAR(out, 5.95, 1e-6);
  EXPECT_FALSE(skips(1.2));
  EXPECT_TRUE(skips(1.3)) << "compared with 1, it would not";
}

// The first of two tokens does not change, the second one changes by a third of all that was added.
TEST(BlockCache, DecidesAlikeInAllRanksByAllTokens) {
  const auto memory = unwrap(parallel::create_group_memory(2, std::chrono::seconds(20)));
  std::array<std::array<bool, 2>, 2> skipped{};  // by rank, for thresholds below and above
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      const parallel::Sequence sequence(parallel::Team::all(unwrap(parallel::join_group_memory(memory.get(), rank))),
                                        2);
      for (const bool above : {false, true}) {
        BlockCache cache(above ? 0.34 : 0.33);
        at::Tensor after = at::ones({1, 1, 3}) * (rank + 1);
        cache.skips(at::zeros({1, 1, 3}), after, &sequence);
        cache.finish(after);
        after = at::ones({1, 1, 3}) * (2 * rank + 1);
        skipped[rank][above] = cache.skips(at::zeros({1, 1, 3}), after, &sequence);
      }
    });
  for (auto& rank : ranks) rank.join();
  for (const auto& rank : skipped) EXPECT_EQ(rank, (std::array{false, true}));
}

TEST(BlockCaches, AreNotSharedByTransformersOrPrompts) {
  BlockCaches caches(0.1);
  const auto skips = [&](std::size_t expert, bool negative) {
    at::Tensor after = at::ones({1, 1, 3});
    BlockCache& cache = caches.of(expert, negative);
    if (cache.skips(at::zeros({1, 1, 3}), after, nullptr)) return true;
    cache.finish(after);
    return false;
  };
  EXPECT_FALSE(skips(0, false));
  EXPECT_FALSE(skips(0, true));
  EXPECT_TRUE(skips(0, false));
  EXPECT_TRUE(skips(0, true));
  EXPECT_FALSE(skips(1, false));
  EXPECT_FALSE(skips(1, true));
}

// Ranks that exchange tokens have to decide alike, but the two forwards may decide differently.
TEST(BlockCaches, RunBothForwardsInAllRanksUnlessTheyExchangeNothing) {
  struct Counting final : Denoiser {
    std::vector<std::pair<bool, int>> calls;  // negative, ranks
    at::Tensor velocity(std::int64_t, const at::Tensor& latents, bool negative, const parallel::Team& team,
                        BlockCache*) override {
      calls.emplace_back(negative, team.count);
      return latents;
    }
    double guidance_scale(std::int64_t) const override { return 2; }
  } denoiser;
  BlockCaches caches(0.1);
  guided_velocity(denoiser, 0, at::ones({1}), /*two_forwards=*/true, {nullptr, 0, 4}, &caches);
  EXPECT_EQ(denoiser.calls, (std::vector<std::pair<bool, int>>{{false, 4}, {true, 4}}));
}

}  // namespace
}  // namespace ditfleet::pipeline
