// Measures regions on a GPU at FLUX.1-dev's size with random weights, bf16, 512 text tokens: the first and steady
// steps, memory, and numerics compared with eager. Runs one scenario per process, because only one step can be the
// first. gpu.sh runs them all.
//
//   regions_gpu_bench SCENARIO [--mode MODE] [--cache DIR] [--layers DOUBLE,SINGLE] [--revision TEXT] [--machine TEXT]
//
// SCENARIO: cold | shared_cache (the same, with another content of --cache) | warm | skip (skipped blocks) |
//           numerics | vae | profile
#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>
#include <chrono>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/block_programs.h"
#include "pipeline/families/flux/rope.h"
#include "pipeline/nn/vae/image_vae.h"
#include "pipeline/region/libraries/driver.h"
#include "pipeline/region/run/interpreter.h"
#include "pipeline/region/run/region.h"
#include "shared/kernel_cache/cache.h"
#include "tests/bench/flux_size.h"
#include "tests/parity/region_inputs.h"
#include "tests/parity/vae_slots.h"

namespace ditfleet::bench {
namespace {

using Clock = std::chrono::steady_clock;
using c10::ScalarType;
using pipeline::FluxTransformer;
using region::ElementType;

// Times everything from resident weights to the end of the first step.
void first_forward() {
  const auto c = config();
  auto weights = random_weights(c);
  const auto options_bf16 = at::TensorOptions(ScalarType::BFloat16).device(gpu);
  const at::Tensor latents = at::randn({1, 4096, 64}, options_bf16), prompt = at::randn({1, kText, 4096}, options_bf16),
                   pooled = at::randn({1, 768}, options_bf16);
  const at::Tensor timesteps = at::linspace(1000, 36, kSteps, at::TensorOptions(ScalarType::Float).device(gpu));
  finish();

  const auto start = Clock::now();
  auto cache = open_cache();
  auto host = region::make_region_host(options(), gpu, cache);
  const double opened = since(start);
  const FluxTransformer flux(c, std::move(weights), {gpu, ScalarType::BFloat16}, host);
  const double compiled = since(start);
  const at::Tensor text = flux.embed_text(prompt),
                   rope = pipeline::rope_table(c, kText, {{64, 64}}, {gpu, ScalarType::BFloat16});
  const auto table = flux.modulation(timesteps, 3.5, pooled);
  finish();
  const double prepared = since(start);
  flux.velocity(latents, text, table.step(0), rope);
  finish();
  const double first = since(start);
  row("first_forward_s", first, "s");
  row("open_libraries_s", opened, "s");
  row("compile_s", compiled - opened, "s");
  row("request_tables_s", prepared - compiled, "s");
  row("first_step_s", first - prepared, "s");
  row("steady_step_ms", steady_s([&] { flux.velocity(latents, text, table.step(1), rope); }, 5) * 1e3, "ms");
  row("compiles", host->cache ? static_cast<double>(host->cache->counts().compiles) : 0, "programs");
}

// The layers of a text encoder over one prompt, with heads of 64. All layers share random weights.
class EncoderLayers {
 public:
  // `gated`: as in T5, the activated branch is multiplied with another.
  EncoderLayers(int layers, std::int64_t tokens, std::int64_t heads, std::int64_t inner, bool gated)
      : layers_(layers), heads_(heads) {
    const auto random = [](std::int64_t rows, std::int64_t columns) {
      return 0.02 * at::randn({rows, columns}, at::TensorOptions(ScalarType::BFloat16).device(gpu));
    };
    const std::int64_t width = 64 * heads;
    hidden_ = random(tokens, width);
    for (at::Tensor* square : {&q_, &k_, &v_, &o_}) *square = random(width, width);
    wi_ = random(inner, width);
    if (gated) gate_ = random(inner, width);
    wo_ = random(width, inner);
  }
  void run() {
    at::Tensor x = hidden_;
    for (int i = 0; i < layers_; ++i) {
      at::Tensor normed = at::layer_norm(x, {x.size(1)});
      const auto heads = [&](const at::Tensor& weight) {
        return at::linear(normed, weight).view({1, -1, heads_, 64}).transpose(1, 2);
      };
      const at::Tensor attended = at::scaled_dot_product_attention(heads(q_), heads(k_), heads(v_));
      x = x + at::linear(attended.transpose(1, 2).reshape(x.sizes()), o_);
      normed = at::layer_norm(x, {x.size(1)});
      at::Tensor branch = at::gelu(at::linear(normed, wi_), "tanh");
      if (gate_.defined()) branch = branch * at::linear(normed, gate_);
      x = x + at::linear(branch, wo_);
    }
  }

 private:
  const int layers_;
  const std::int64_t heads_;
  at::Tensor hidden_, q_, k_, v_, o_, wi_, gate_, wo_;
};

// The GPU work of FLUX's encode(): CLIP-L, T5-XXL, and the modulation of all steps.
class TextStage {
 public:
  explicit TextStage(const FluxTransformer& flux) : flux_(flux) {}
  void run(const Inputs& in) {
    clip_.run();
    t5_.run();
    flux_.modulation(in.timesteps, 3.5, in.pooled);
    finish();
  }

 private:
  const FluxTransformer& flux_;
  EncoderLayers clip_{12, 77, 12, 3072, false}, t5_{24, kText, 64, 10240, true};
};

void warm() {
  const auto c = config();
  auto host = region::make_region_host(options(), gpu, open_cache());
  const FluxTransformer flux(c, random_weights(c), {gpu, ScalarType::BFloat16}, host);
  const auto steps_of = [&](const Inputs& in, const pipeline::ModulationTable& table) {
    return [&in, &table, &flux] { flux.velocity(in.latents, in.text, table.step(0), in.rope); };
  };
  const Inputs at_1024(flux, 1024, 1024);
  const auto table = flux.modulation(at_1024.timesteps, 3.5, at_1024.pooled);
  const auto step = steps_of(at_1024, table);
  for (int i = 0; i < 4; ++i) step();
  row("step_1024_ms", steady_s(step, 21) * 1e3, "ms");
  finish();
  const auto begun = Clock::now();
  step();
  row("host_1024_ms", since(begun) * 1e3, "ms");  // until the last kernel is enqueued
  const auto image = [&] {
    const auto rows = flux.modulation(at_1024.timesteps, 3.5, at_1024.pooled);
    at::Tensor x = at_1024.latents;
    for (int i = 0; i < kSteps; ++i) x = x + 0.01 * flux.velocity(x, at_1024.text, rows.step(i), at_1024.rope);
  };
  row("image_1024_28_s", steady_s(image, 3), "s");
  std::size_t free = 0, total = 0;
  pipeline::unwrap(region::driver())->memory_info(&free, &total);
  row(flags["--mode"] == "reduce-overhead"   ? "reduce_overhead_peak_gb"
      : flags["--mode"].rfind("max", 0) == 0 ? "max_autotune_peak_gb"
                                             : "default_peak_gb",
      static_cast<double>(total - free) / 1e9, "GB", "memory");

  TextStage text(flux);
  text.run(at_1024);
  row("text_stage_ms", steady_s([&] { text.run(at_1024); }, 5) * 1e3, "ms");
  const auto compiles = host->counters->counts().compiles;
  // The attention plan of a new size is made here or found in the cache, which are two figures. As in encode(), the
  // plan is prewarmed when the prompt's encoding begins, except in the "unexpected" figures.
  const auto plans = host->cache->counts().compiles;
  const auto extra = [&](const std::string& of) {
    return of + (host->cache->counts().compiles > plans ? "_extra_s" : "_in_cache_extra_s");
  };
  const auto first_less_steady = [&](int height, int width, bool expected) {
    const Inputs in(flux, height, width);
    if (expected) flux.prewarm(kText, in.latents.size(1));
    text.run(in);
    const auto one = steps_of(in, table);
    const double first = first_s(one), steady = steady_s(one, 9);
    const std::string size = std::to_string(height) + "x" + std::to_string(width);
    row("first_" + size + "_ms", first * 1e3, "ms");
    if (height == 512) row("step_512_ms", steady * 1e3, "ms");
    return first - steady;
  };
  double worst = 0, unexpected = 0;
  for (const auto& [height, width] : {std::pair(768, 1360), {512, 512}, {832, 1216}, {640, 1536}})
    worst = std::max(worst, first_less_steady(height, width, true));
  for (const auto& [height, width] : {std::pair(896, 1152), {704, 1408}})
    unexpected = std::max(unexpected, first_less_steady(height, width, false));
  row(extra("new_resolution"), worst, "s");
  row(extra("new_resolution_unexpected"), unexpected, "s");
  const Inputs at_256(flux, 256, 256);
  const auto one_at_256 = steps_of(at_256, table);
  one_at_256();
  row("step_256_ms", steady_s(one_at_256, 21) * 1e3, "ms");
  row("compiles_after_warm_up", static_cast<double>(host->counters->counts().compiles - compiles), "programs");
}

// A step that the first-block cache skips, one that it computes, and one without it; 28 steps without it, and with it.
// How often random weights skip says nothing about trained ones, so the latents make it skip what the demo model skips
// with a threshold of 0.08: latents that stay are skipped, others are not.
void skip() {
  constexpr double kNever = 1e-9, kAlways = 1e9;
  const auto c = config();
  auto host = region::make_region_host(options(), gpu, open_cache());
  const FluxTransformer flux(c, random_weights(c), {gpu, ScalarType::BFloat16}, host);
  const Inputs in(flux, 1024, 1024);
  const auto table = flux.modulation(in.timesteps, 3.5, in.pooled);
  for (const auto& [name, threshold] : {std::pair("computed", kNever), {"skipped", kAlways}}) {
    pipeline::BlockCache cache(threshold);
    int i = 0;
    const auto step = [&] { flux.velocity(in.latents, in.text, table.step(i++ % kSteps), in.rope, {}, &cache); };
    step();
    row(std::string(name) + "_step_ms", steady_s(step, 21) * 1e3, "ms");
  }
  row("plain_step_ms", steady_s([&] { flux.velocity(in.latents, in.text, table.step(0), in.rope); }, 21) * 1e3, "ms");

  constexpr std::string_view kDemo = "ccscsscsscsscsscsscscscscccc";  // s: skipped. "a red circle", 256×256, seed 1
  static_assert(kDemo.size() == kSteps);
  const at::Tensor latents[] = {in.latents, Inputs(flux, 1024, 1024).latents};
  const auto steps = [&](bool cached) {
    pipeline::BlockCache cache(0.08);
    std::size_t computed = 0;
    for (const char step : kDemo) {
      computed += step == 'c';
      flux.velocity(latents[computed % 2], in.text, table.step(0), in.rope, {}, cached ? &cache : nullptr);
      if (cached && cache.skipped() != (step == 's')) throw std::logic_error("other steps than the demo's are skipped");
    }
  };
  const double plain = steady_s([&] { steps(false); }, 3), cached = steady_s([&] { steps(true); }, 3);
  row("image_28_s", plain, "s");
  row("image_28_cached_s", cached, "s");
  row("cached_ratio", cached / plain, "1");
}

// Relative L2 error against fp32, divided by that of eager bf16, of each block and of a whole step. Uses eight inputs,
// half of them with some channels scaled by 100.
void numerics() {
  auto host = region::make_region_host(options(), gpu, open_cache());
  const region::Sizes sizes{{"batch", 1}, {"image", 4096}, {"text", kText}, {"tokens", 4096 + kText}};
  double worst = 0;
  for (const auto& [name, make] :
       {std::pair("double", &region::flux_double_block), std::pair("single", &region::flux_single_block)}) {
    const auto recipe = [make = make](ElementType type) { return make({.heads = 24, .head_dim = 128, .type = type}); };
    region::Region block(name, recipe, host);
    const auto program = recipe(ElementType::kBF16).value();
    double of_block = 0;
    for (int i = 0; i < 8; ++i) {
      const auto inputs = region::testing::random_inputs(program, sizes, static_cast<std::uint64_t>(i),
                                                         {.outliers = i % 2 == 1, .device = gpu});
      std::vector<at::Tensor> got;
      block.run(inputs, got);
      const auto eager = region::interpret(program, inputs),
                 reference = region::interpret(program, region::testing::converted(inputs, ScalarType::Float));
      for (std::size_t o = 0; o < got.size(); ++o)
        of_block = std::max(of_block, region::testing::relative_error(got[o], reference[o]) /
                                          region::testing::relative_error(eager[o], reference[o]));
    }
    row(std::string("rel_l2_ratio_") + name + "_block", of_block, "x");
    worst = std::max(worst, of_block);
  }
  const auto c = config();
  const auto weights = random_weights(c);
  const auto as_float = [](pipeline::TransformerWeights w) {
    const auto linear = [](pipeline::LinearSlot& l) {
      l.weight = l.weight.to(ScalarType::Float);
      l.bias = l.bias.to(ScalarType::Float);
    };
    for (auto& l : w.linears) linear(l);
    for (auto& block : w.blocks) {
      for (auto& l : block.linears) linear(l);
      for (at::Tensor& norm : block.tensors) norm = norm.to(ScalarType::Float);
    }
    return w;
  };
  const FluxTransformer compiled(c, weights, {gpu, ScalarType::BFloat16}, host),
      eager(c, weights, {gpu, ScalarType::BFloat16}, nullptr),
      reference(c, as_float(weights), {gpu, ScalarType::Float}, nullptr);
  double of_step = 0;
  for (int i = 0; i < 8; ++i) {
    Inputs in(eager, 512, 512);
    if (i % 2 == 1)
      for (std::int64_t channel = 0; channel < 3072; channel += 37) in.text.select(-1, channel).mul_(100);
    const auto table = eager.modulation(in.timesteps, 3.5, in.pooled),
               exact = reference.modulation(in.timesteps, 3.5, in.pooled.to(ScalarType::Float));
    const auto rows = table.step(i);
    const at::Tensor wanted =
        reference.velocity(in.latents.to(ScalarType::Float), in.text.to(ScalarType::Float), exact.step(i), in.rope);
    const double mine = region::testing::relative_error(compiled.velocity(in.latents, in.text, rows, in.rope), wanted);
    const double theirs = region::testing::relative_error(eager.velocity(in.latents, in.text, rows, in.rope), wanted);
    of_step = std::max(of_step, mine / theirs);
    row("rel_l2_step_" + std::to_string(i), mine, "1");
    row("rel_l2_step_eager_" + std::to_string(i), theirs, "1");
  }
  row("rel_l2_ratio_step", of_step, "x");
  row("rel_l2_ratio", std::max(worst, of_step), "x");
}

// The VAE's decoder, compiled and eager.
void vae() {
  auto host = region::make_region_host(options(), gpu, open_cache());
  const auto config = pipeline::testing::flux_vae_config();
  const pipeline::Placement bf16{gpu, ScalarType::BFloat16}, fp32{gpu, ScalarType::Float};
  using pipeline::testing::random_vae_slots;
  const pipeline::ImageVae compiled(config, random_vae_slots(config, bf16), host),
      eager(config, random_vae_slots(config, bf16), nullptr);
  for (const int side : {1024, 512}) {
    const at::Tensor latents =
        at::randn({1, 16, side / 8, side / 8}, at::TensorOptions(ScalarType::BFloat16).device(gpu));
    const std::string name = "decode_" + std::to_string(side);
    row(name + "_first_ms", first_s([&] { compiled.decode(latents); }) * 1e3, "ms");
    for (int i = 0; i < 3; ++i) compiled.decode(latents), eager.decode(latents);
    row(name + "_ms", steady_s([&] { compiled.decode(latents); }, 21) * 1e3, "ms");
    row(name + "_eager_ms", steady_s([&] { eager.decode(latents); }, 21) * 1e3, "ms");
  }
  const pipeline::ImageVae reference(config, random_vae_slots(config, fp32), nullptr);
  double worst = 0;
  for (int i = 0; i < 8; ++i) {
    at::Tensor latents = at::randn({1, 16, 64, 64}, at::TensorOptions(ScalarType::BFloat16).device(gpu));
    if (i % 2 == 1) latents.select(1, i).mul_(100);
    const at::Tensor wanted = reference.decode(latents.to(ScalarType::Float));
    worst = std::max(worst, region::testing::relative_error(compiled.decode(latents), wanted) /
                                region::testing::relative_error(eager.decode(latents), wanted));
  }
  row("rel_l2_ratio_vae", worst, "x", "numerics");
}

// Runs a few steps for a profiler.
void profile() {
  const auto c = config();
  auto host = region::make_region_host(options(), gpu, open_cache());
  const FluxTransformer flux(c, random_weights(c), {gpu, ScalarType::BFloat16}, host);
  const Inputs in(flux, 1024, 1024);
  const auto table = flux.modulation(in.timesteps, 3.5, in.pooled);
  for (int i = 0; i < 3; ++i) flux.velocity(in.latents, in.text, table.step(0), in.rope);
  finish();
}

}  // namespace
}  // namespace ditfleet::bench

int main(int argc, char** argv) {
  using namespace ditfleet::bench;
  run(argc, argv,
      {{"cold", first_forward},
       {"shared_cache", first_forward},
       {"warm", warm},
       {"skip", skip},
       {"numerics", numerics},
       {"vae", vae},
       {"profile", profile}});
}
