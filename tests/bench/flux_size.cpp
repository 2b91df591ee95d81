#include "tests/bench/flux_size.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "pipeline/device/failure.h"
#include "pipeline/device/memory.h"
#include "pipeline/families/flux/rope.h"
#include "shared/kernel_cache/cache.h"
#include "shared/kernel_cache/open.h"

namespace ditfleet::bench {

using Clock = std::chrono::steady_clock;
using c10::ScalarType;

std::map<std::string, std::string> flags{{"--device", "cuda"},    {"--mode", "default"}, {"--cache", ""},
                                         {"--layers", "19,38"},   {"--model", ""},       {"--quantize", ""},
                                         {"--attention", ""},     {"--prompts", ""},     {"--revision", "unknown"},
                                         {"--machine", "unknown"}};
std::string scenario;
c10::Device gpu(c10::DeviceType::CPU);

void row(const std::string& metric, double value, const char* unit, const std::string& in) {
  char now[32];
  const std::time_t t = std::time(nullptr);
  std::strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&t));
  std::printf("%s,%s,%s,torch 2.11.0,ditfleet %s,%s,%s,%.6g,%s\n", now, flags["--revision"].c_str(),
              flags["--machine"].c_str(), flags["--mode"].c_str(), in.c_str(), metric.c_str(), value, unit);
  std::fflush(stdout);
}

PeakSampler::PeakSampler(std::function<void(std::int64_t)> on_sample)
    : thread_([this, on_sample = std::move(on_sample)] {
        while (!done_) {
          const auto info = pipeline::memory_info(gpu);
          const std::int64_t used = info.total - info.free;
          peak_ = std::max<std::int64_t>(peak_, used);
          if (on_sample) on_sample(used);
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
      }) {}

double PeakSampler::stop() {
  done_ = true;
  if (thread_.joinable()) thread_.join();
  return gb();
}

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
void finish() { pipeline::synchronize(gpu); }

pipeline::FluxConfig config() {
  const std::string& layers = flags["--layers"];
  return {.in_channels = 64,
          .token_out = 64,
          .num_layers = std::atoll(layers.c_str()),
          .num_single_layers = std::atoll(layers.c_str() + layers.find(',') + 1),
          .head_dim = 128,
          .heads = 24,
          .joint_attention_dim = 4096,
          .pooled_projection_dim = 768,
          .guidance_embeds = true,
          .axes_dims_rope = {16, 56, 56}};
}

pipeline::TransformerWeights random_weights(const pipeline::FluxConfig& c, std::int64_t adapter_rank) {
  const auto options = at::TensorOptions(ScalarType::BFloat16).device(gpu);
  const auto linear = [&](const pipeline::LinearSpec& spec) {
    const auto names = static_cast<std::int64_t>(spec.names.size());
    pipeline::LinearSlot slot{at::empty({names * spec.out, spec.in}, options).normal_(0, 0.02),
                              at::empty({names * spec.out}, options).normal_(0, 0.02)};
    if (adapter_rank == 0 || spec.input.empty()) return slot;
    pipeline::LinearSlot wide = pipeline::slot_with_lora_columns(names * spec.out, spec.in,
                                                                 {names * adapter_rank, spec.columns_before}, options);
    wide.weight.copy_(slot.weight);
    wide.bias = slot.bias;
    return wide;
  };
  const pipeline::TransformerSpec spec = pipeline::flux_spec(c);
  pipeline::TransformerWeights made;
  for (const auto& one : spec.linears) made.linears.push_back(linear(one));
  for (std::size_t kind = 0; kind < spec.blocks.size(); ++kind)
    for (std::int64_t i = 0; i < spec.blocks[kind].count; ++i) {
      auto& block = made.blocks.emplace_back(pipeline::TransformerBlock{kind, {}, {}});
      for (const auto& one : spec.blocks[kind].linears) block.linears.push_back(linear(one));
      for (const auto& one : spec.blocks[kind].tensors) block.tensors.push_back(at::ones(one.shape, options));
    }
  return made;
}

std::shared_ptr<kernel_cache::KernelCache> open_cache() {
  if (flags["--cache"].empty()) return nullptr;
  config::Settings settings;
  settings.cache.dir = flags["--cache"];
  settings.cache.redis = false;
  return pipeline::unwrap(kernel_cache::open_cache(settings));
}

region::CompileOptions options() {
  region::CompileOptions o;
  o.backend = gpu.is_cpu() ? "cpu_jit" : "nvrtc";
  o.mode = flags["--mode"];
  o.fullgraph = true;
  return o;
}

Inputs::Inputs(const pipeline::FluxTransformer& flux, int height, int width, int steps) {
  const auto bf16 = at::TensorOptions(ScalarType::BFloat16).device(gpu);
  latents = at::randn({1, height / 16 * (width / 16), 64}, bf16);
  text = flux.embed_text(at::randn({1, kText, 4096}, bf16));
  pooled = at::randn({1, 768}, bf16);
  rope = pipeline::rope_table(flux.config(), kText, {{height / 16, width / 16}}, {gpu, ScalarType::BFloat16});
  timesteps = at::linspace(1000, 36, steps, at::TensorOptions(ScalarType::Float).device(gpu));
}

double first_s(const std::function<void()>& step) {
  finish();
  const auto start = Clock::now();
  step();
  finish();
  return since(start);
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double steady_s(const std::function<void()>& step, int rounds) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) times.push_back(first_s(step));
  return median(std::move(times));
}

void run(int argc, char** argv, const std::map<std::string, void (*)()>& scenarios) {
  int status = 0;
  scenario = argc > 1 ? argv[1] : "";
  for (int i = 2; i + 1 < argc; i += 2) {
    if (!flags.contains(argv[i])) scenario.clear();
    flags[argv[i]] = argv[i + 1];
  }
  const c10::InferenceMode inference(true);
  if (!scenarios.contains(scenario)) {
    std::string known;
    for (const auto& [name, unused] : scenarios) known += (known.empty() ? "" : "|") + name;
    std::fprintf(
        stderr,
        "usage: %s %s [--mode MODE] [--cache DIR] [--layers DOUBLE,SINGLE] [--revision TEXT] [--machine TEXT]\n",
        argv[0], known.c_str());
    status = 2;
  } else {
    try {
      gpu = pipeline::load_device(flags["--device"]).device;
      scenarios.at(scenario)();
    } catch (...) {
      std::fprintf(stderr, "%s: %s\n", argv[0], pipeline::error_in_flight("bench").message.c_str());
      status = 1;
    }
  }
  std::fflush(nullptr);
  std::_Exit(status);
}

}  // namespace ditfleet::bench
