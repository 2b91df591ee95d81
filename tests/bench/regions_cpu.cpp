// Compares compiled regions (cpu_jit) with eager on a CPU: chains that fusion turns into one kernel, and a step of a
// model. Runs alternate; prints medians as CSV rows (tests/bench/README.md).
//
//   regions_cpu_bench --model DIR [--rounds N] [--threads N] [--revision TEXT] [--machine TEXT]
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <map>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/rope.h"
#include "pipeline/families/flux/transformer.h"
#include "pipeline/region/ir/builder.h"
#include "pipeline/region/run/interpreter.h"
#include "pipeline/region/run/region.h"
#include "tests/parity/region_inputs.h"

namespace ditfleet {
namespace {

using Clock = std::chrono::steady_clock;
using region::Builder;
using region::Dim;
using region::ElementType;

const c10::Device kCpu(c10::DeviceType::CPU);
std::map<std::string, std::string> flags{
    {"--rounds", "21"}, {"--threads", "0"}, {"--revision", "unknown"}, {"--machine", "unknown"}, {"--model", ""}};

void row(const std::string& system, const std::string& scenario, const std::string& metric, double value,
         const char* unit) {
  char now[32];
  const std::time_t t = std::time(nullptr);
  std::strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&t));
  std::printf("%s,%s,%s,torch 2.11.0,%s,%s,%s,%.6g,%s\n", now, flags["--revision"].c_str(), flags["--machine"].c_str(),
              system.c_str(), scenario.c_str(), metric.c_str(), value, unit);
  std::fflush(stdout);
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

double ms_of(const std::function<void()>& f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

struct Pair {
  double eager = 0, compiled = 0;  // medians, ms
};

// Alternates runs after one warm-up run of each.
Pair alternate(int rounds, const std::function<void()>& eager, const std::function<void()>& compiled) {
  eager();
  compiled();
  std::vector<double> a, b;
  for (int i = 0; i < rounds; ++i) {
    a.push_back(ms_of(eager));
    b.push_back(ms_of(compiled));
  }
  return {median(a), median(b)};
}

struct Chain {
  const char* name;
  region::Region::Recipe recipe;
};

// The chains between GEMMs and attention in FLUX's blocks. `width` = heads · head_dim.
std::vector<Chain> chains(std::int64_t heads, std::int64_t head_dim) {
  const std::int64_t d = heads * head_dim;
  const Dim batch = Dim::symbol("batch"), tokens = Dim::symbol("tokens");
  return {
      {"norm_modulate",
       [=](ElementType type) {
         Builder b("norm_modulate", type);
         const auto x = b.activation("x", {batch, tokens, d});
         return b.finish({b.modulate("y", b.layer_norm("n", x, 1e-6), b.table("scale", type, {batch, 1, d}),
                                     b.table("shift", type, {batch, 1, d}))});
       }},
      {"residual_norm_modulate",
       [=](ElementType type) {
         Builder b("residual_norm_modulate", type);
         const auto x = b.activation("x", {batch, tokens, d}), branch = b.activation("branch", {batch, tokens, d});
         const auto sum = b.gate_residual("sum", x, b.table("gate", type, {batch, 1, d}), branch);
         return b.finish({sum, b.modulate("y", b.layer_norm("n", sum, 1e-6), b.table("scale", type, {batch, 1, d}),
                                          b.table("shift", type, {batch, 1, d}))});
       }},
      {"qk_norm_rope",
       [=](ElementType type) {
         Builder b("qk_norm_rope", type);
         const auto rope =
             b.reshape("rows", b.table("rope", ElementType::kF32, {tokens, head_dim}), {1, tokens, 1, head_dim});
         std::vector<Builder::Ref> made;
         for (const char* name : {"q", "k"}) {
           const auto x = b.activation(std::string(name) + ".in", {batch, tokens, heads, head_dim});
           made.push_back(b.rope(
               name,
               b.rms_norm(std::string(name) + ".n", x, b.parameter(std::string(name) + ".norm", {head_dim}), 1e-6),
               rope));
         }
         return b.finish(made);
       }},
      {"gelu",
       [=](ElementType type) {
         Builder b("gelu", type);
         return b.finish({b.gelu_tanh("y", b.activation("x", {batch, tokens, 4 * d}))});
       }},
  };
}

void bench_chains(const std::string& where, std::int64_t heads, std::int64_t head_dim, std::int64_t tokens,
                  int rounds) {
  for (ElementType type : {ElementType::kF32, ElementType::kBF16}) {
    double eager = 0, compiled = 0, fused_eager = 0, fused_compiled = 0;  // fused_*: without GELU, which is a single op
    for (const Chain& chain : chains(heads, head_dim)) {
      const auto program = pipeline::unwrap(chain.recipe(type));
      const auto inputs = region::testing::random_inputs(program, {{"batch", 1}, {"tokens", tokens}}, 1);
      region::Region made(chain.name, chain.recipe,
                          region::make_region_host({.backend = "cpu_jit", .fullgraph = true}, kCpu, nullptr));
      std::vector<at::Tensor> outputs;  // reused; eager allocates its own outputs
      const Pair p = alternate(
          rounds, [&] { region::interpret(program, inputs); }, [&] { made.run(inputs, outputs); });
      const std::string scenario = "chain_" + where + "_" + std::string(region::name_of(type)) + "_" + chain.name;
      row("eager", scenario, "median_ms", p.eager, "ms");
      row("cpu_jit", scenario, "median_ms", p.compiled, "ms");
      row("summary", scenario, "speedup", p.eager / p.compiled, "x");
      eager += p.eager;
      compiled += p.compiled;
      if (std::string(chain.name) == "gelu") continue;
      fused_eager += p.eager;
      fused_compiled += p.compiled;
    }
    row("summary", "fused_chains_" + where + "_" + std::string(region::name_of(type)), "speedup",
        fused_eager / fused_compiled, "x");
    row("summary", "chains_" + where + "_" + std::string(region::name_of(type)), "speedup", eager / compiled, "x");
  }
}

void bench_step(const std::string& dir, int rounds) {
  for (c10::ScalarType type : {c10::ScalarType::Float, c10::ScalarType::BFloat16}) {
    const std::string name = type == c10::ScalarType::Float ? "f32" : "bf16";
    const pipeline::Placement placement{kCpu, type};
    const auto cache = region::make_memory_cache();
    const auto host = [&] { return region::make_region_host({.backend = "cpu_jit", .fullgraph = true}, kCpu, cache); };
    const auto load = [&](std::shared_ptr<region::RegionHost> regions) {
      auto flux = pipeline::FluxTransformer::load({.files = dir + "/transformer", .regions = regions}, placement);
      pipeline::Transformer::compile({&flux}, regions);
      return flux;
    };
    const double plain_load = ms_of([&] { load(nullptr); });
    const double cold_load = ms_of([&] { load(host()); });
    const double warm_load = ms_of([&] { load(host()); });
    row("cpu_jit", "demo_step_" + name, "cold_compile_ms", cold_load - plain_load, "ms");
    row("cpu_jit", "demo_step_" + name, "warm_compile_ms", warm_load - plain_load, "ms");

    const auto shared = host();
    const auto eager = load(nullptr), compiled = load(shared);
    const auto& config = eager.config();
    constexpr std::int64_t kText = 32, kRows = 16, kColumns = 16;  // 256×256 and the demo's prompt length
    const auto draw = [&](std::vector<std::int64_t> shape) {
      return at::randn(shape, at::TensorOptions(c10::ScalarType::Float)).to(type);
    };
    const at::Tensor latents = draw({1, kRows * kColumns, config.in_channels}),
                     prompt = draw({1, kText, config.joint_attention_dim});
    const at::Tensor rope = pipeline::rope_table(config, kText, {{kRows, kColumns}}, placement);
    const auto table = eager.modulation(at::full({1}, 500.0), 3.5, draw({1, config.pooled_projection_dim}));
    const auto rows = table.step(0);
    const at::Tensor text = eager.embed_text(prompt);
    at::Tensor a, b;
    const Pair p = alternate(
        rounds, [&] { a = eager.velocity(latents, text, rows, rope); },
        [&] { b = compiled.velocity(latents, text, rows, rope); });
    row("eager", "demo_step_" + name, "median_ms", p.eager, "ms");
    row("cpu_jit", "demo_step_" + name, "median_ms", p.compiled, "ms");
    row("summary", "demo_step_" + name, "speedup", p.eager / p.compiled, "x");
    row("summary", "demo_step_" + name, "relative_difference", region::testing::relative_error(b, a), "1");
    row("cpu_jit", "demo_step_" + name, "recompiles", static_cast<double>(shared->counters->counts().recompiles), "1");
  }
}

int run(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!flags.contains(argv[i])) {
      std::fprintf(stderr, "regions_cpu_bench: unknown flag %s\n", argv[i]);
      return 2;
    }
    flags[argv[i]] = argv[i + 1];
  }
  const int rounds = std::max(1, std::atoi(flags["--rounds"].c_str())), threads = std::atoi(flags["--threads"].c_str());
  if (threads > 0) at::set_num_threads(threads);
  c10::InferenceMode inference(true);
  row("machine", "environment", "threads", at::get_num_threads(), "1");
  bench_chains("demo", 6, 32, 288, rounds);
  bench_chains("flux", 24, 128, 512, std::max(1, rounds / 3));
  if (!flags["--model"].empty()) bench_step(flags["--model"], rounds);
  return 0;
}

}  // namespace
}  // namespace ditfleet

int main(int argc, char** argv) {
  try {
    return ditfleet::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "regions_cpu_bench: %s\n", e.what());
    return 1;
  }
}
