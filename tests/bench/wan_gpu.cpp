// Measures one forward of a Wan 2.2 A14B expert on a GPU, with random weights made there, at 832×480 and 49 and 81
// frames, 512 text tokens. Runs one scenario per process, because only one forward can be the first. gpu.sh runs them.
//
//   wan_gpu_bench SCENARIO [--mode MODE] [--cache DIR] [--layers BLOCKS,1] [--revision TEXT] [--machine TEXT]
//
// SCENARIO: bf16 | fp8 | eager. With an empty --cache the first forward is cold.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>

#include <chrono>
#include <cstdlib>

#include "pipeline/families/wan/transformer.h"
#include "pipeline/nn/quantized.h"
#include "pipeline/region/run/region.h"
#include "shared/kernel_cache/cache.h"
#include "tests/bench/flux_size.h"

namespace ditfleet::bench {
namespace {

using c10::ScalarType;
using pipeline::WanTransformer;

pipeline::WanConfig config_a14b() {
  return {.in_channels = 16,
          .out_channels = 16,
          .num_layers = std::atoll(flags["--layers"].c_str()),
          .head_dim = 128,
          .heads = 40,
          .text_dim = 4096,
          .freq_dim = 256,
          .ffn_dim = 13824,
          .cross_attn_norm = true,
          .eps = 1e-6,
          .rope_max_seq_len = 1024};
}

// Weights from N(0, 0.02²); norms are 1. fp8: the blocks' linears, as the loader quantizes them.
pipeline::WanSlots random_wan_slots(const pipeline::WanConfig& c, bool fp8) {
  const auto bf16 = at::TensorOptions(ScalarType::BFloat16).device(gpu);
  const auto fp32 = bf16.dtype(ScalarType::Float);
  const std::int64_t d = c.width();
  const auto linear = [&](std::int64_t in, std::int64_t out, const at::TensorOptions& options) {
    return pipeline::LinearSlot{at::empty({out, in}, options).normal_(0, 0.02),
                                at::empty({out}, options).normal_(0, 0.02)};
  };
  const auto of_block = [&](std::int64_t in, std::int64_t out) {
    pipeline::LinearSlot slot = linear(in, out, bf16);
    if (!fp8) return slot;
    auto made = std::make_shared<pipeline::QuantizedWeight>();
    made->out = out;
    made->in = in;
    made->compute = ScalarType::BFloat16;
    made->dynamic = true;
    made->parts.push_back(pipeline::quantize_fp8(slot.weight));
    slot.weight = at::Tensor();
    slot.quantized = std::move(made);
    return slot;
  };
  const auto norm = [&] { return at::ones({d}, bf16); };
  pipeline::WanSlots s;
  s.patch_in = linear(4 * c.in_channels, d, bf16);
  s.time_first = linear(c.freq_dim, d, fp32);
  s.time_second = linear(d, d, fp32);
  s.time_proj = linear(d, 6 * d, bf16);
  s.text_first = linear(c.text_dim, d, bf16);
  s.text_second = linear(d, d, bf16);
  for (std::int64_t i = 0; i < c.num_layers; ++i)
    s.blocks.push_back({at::empty({1, 6, d}, fp32).normal_(0, 0.02),
                        of_block(d, 3 * d),
                        norm(),
                        norm(),
                        of_block(d, d),
                        {at::ones({d}, fp32), at::empty({d}, fp32).normal_(0, 0.02)},
                        of_block(d, d),
                        of_block(d, 2 * d),
                        norm(),
                        norm(),
                        of_block(d, d),
                        of_block(d, c.ffn_dim),
                        of_block(c.ffn_dim, d)});
  s.table = at::empty({1, 2, d}, fp32).normal_(0, 0.02);
  s.patch_out = linear(d, 4 * c.out_channels, bf16);
  return s;
}

void forward(bool fp8, bool compiled) {
  const auto c = config_a14b();
  const auto bf16 = at::TensorOptions(ScalarType::BFloat16).device(gpu);
  WanTransformer wan(c, random_wan_slots(c, fp8), {gpu, ScalarType::BFloat16});
  const at::Tensor text = wan.embed_text(at::randn({1, kText, c.text_dim}, bf16));
  finish();
  const auto begun = std::chrono::steady_clock::now();
  const auto host = region::make_region_host(options(), gpu, open_cache());
  if (compiled) WanTransformer::compile(wan, nullptr, host);
  const double compiled_s = since(begun);
  const std::string start = host->cache->counts().compiles > 0 ? "cold_" : "warm_";
  row(start + "compile_s", compiled_s, "s");
  for (const std::int64_t frames : {49, 81}) {
    const std::int64_t latent = (frames - 1) / 4 + 1;
    const at::Tensor latents = at::randn({1, c.in_channels, latent, 60, 104}, bf16), rope = wan.rope(latent, 60, 104);
    const auto step = [&] { wan.velocity(latents, 900, text, rope); };
    const std::string at = "_" + std::to_string(frames) + "_ms";
    row(start + "first" + at, first_s(step) * 1e3, "ms");
    row("forward" + at, steady_s(step, 7) * 1e3, "ms");
  }
  row("programs", static_cast<double>(host->counters->counts().compiles), "programs");
}

}  // namespace
}  // namespace ditfleet::bench

int main(int argc, char** argv) {
  using namespace ditfleet::bench;
  flags["--layers"] = "40,1";
  run(argc, argv, {{"bf16", [] { forward(false, true); }}, {"fp8", [] { forward(true, true); }}, {"eager", [] {
                                                                                                    forward(false,
                                                                                                            false);
                                                                                                  }}});
}
