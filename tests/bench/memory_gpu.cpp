// Measures memory plans on a GPU with the folder --model of FLUX.1-dev's size, 1024×1024, 28 steps. gpu.sh runs it.
//
//   memory_gpu_bench SCENARIO --model DIR [--cache DIR] [--revision TEXT] [--machine TEXT]
//   memory_gpu_bench contain --device cpu --model deploy/demo-model/model …     the same with small images on a CPU
//
// SCENARIO: offload_bf16 | offload_fp8 | offload_nf4
//                        all weights resident, then memory.offload block: peak, image and steady step, and their
//                        ratios. fp8 and nf4 have T5 in NF4. offload_nf4 also measures `model`, which evicts text
//                        encoders
//           limit12      memory.limit 12 GiB with quantize auto
//           contain      200 images of four steps at four sizes, then the same with ten more that are too large
//           boot_bf16 | boot_fp8 | boot_nf4
//                        the load of each part, and from the process's start to the first PNG, quantized on
//                        load; run it twice, since the first run compiles and fills the page cache
//           switch       two models that do not fit together, in turns. A prompt is encoded while the other model
//                        draws, so the time is that from its end to the first step
//
// A peak is total - free memory of the device in 10⁹ bytes, sampled every 5 ms over whole requests: the first two, and
// one after those that are timed.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <fstream>
#include <random>
#include <thread>

#include "pipeline/device/failure.h"
#include "pipeline/device/memory.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "shared/kernel_cache/cache.h"
#include "shared/media/writer.h"
#include "tests/bench/flux_size.h"

namespace ditfleet::bench {
namespace {

using Clock = std::chrono::steady_clock;
using pipeline::unwrap;

constexpr double kGib = 1 << 30;

using Formats = std::map<std::string, std::string>;
const Formats kFp8{{"transformer", "fp8"}, {"text_encoder_2", "nf4"}};
const Formats kNf4{{"transformer", "nf4"}, {"text_encoder_2", "nf4"}};

std::unique_ptr<pipeline::Engine> open_engine(const std::string& offload, double limit_gib = 0) {
  pipeline::EngineOptions o;
  o.device = flags["--device"];
  o.compile = options();
  o.kernel_cache = open_cache();
  o.memory = {offload, static_cast<std::int64_t>(limit_gib * kGib), 0};
  return unwrap(pipeline::Engine::create(o, {&pipeline::flux_family()}));
}

std::atomic<std::int64_t> stage_peak = 0;  // of the sampler since the last stage, for the log

struct Image {
  double seconds = 0;
  std::vector<double> steps;
};

// From a new prompt to a PNG.
Result<Image> draw(pipeline::Model& model, int side = 1024, int steps = kSteps) {
  static int prompts = 0;
  pipeline::GenerationRequest request;
  request.prompt = "picture number " + std::to_string(++prompts);
  request.seed = prompts;
  request.fields.set("width", side);
  request.fields.set("height", side);
  request.fields.set("num_inference_steps", steps);
  Image image;
  const auto use = [](const char* stage) {
    const auto info = pipeline::memory_info(gpu);
    std::fprintf(stderr, "%s: %.2f GB, peak %.2f GB, tensors %.2f GB; ", stage,
                 static_cast<double>(info.total - info.free) / 1e9, static_cast<double>(stage_peak.exchange(0)) / 1e9,
                 static_cast<double>(pipeline::memory_use(gpu).now) / 1e9);
  };
  const auto start = Clock::now();
  auto generation = model.encode(request);
  if (!generation) return generation.error();
  use("encoded");
  auto last = Clock::now();
  const auto on_step = [&](const pipeline::StepProgress&) {
    image.steps.push_back(since(std::exchange(last, Clock::now())));
    return true;
  };
  if (auto denoised = model.denoise(**generation, on_step); !denoised) return denoised.error();
  use("denoised");
  auto pixels = model.decode(**generation);
  use("decoded");
  if (!pixels) return pixels.error();
  for (const auto& [phase, us] : (*generation)->phases_us())
    std::fprintf(stderr, "%s %.1f ms, ", phase.c_str(), static_cast<double>(us) / 1e3);
  std::fprintf(stderr, "first steps %.1f %.1f %.1f ms\n", image.steps[0] * 1e3, image.steps[1] * 1e3,
               image.steps.back() * 1e3);
  unwrap(media::encode(*pixels, job::OutputFormat::kPng, 100));
  image.seconds = since(start);
  return image;
}

struct Figures {
  double image_s = 0, step_s = 0, peak_gb = 0;
};

// Medians of three images after the first two. Sampling slows down encoding, so these are not sampled.
Figures measure(const std::string& offload, const Formats& formats, double limit_gib = 0) {
  const auto engine = open_engine(offload, limit_gib);
  pipeline::ModelSource source{"flux", flags["--model"]};
  source.quantize = formats;
  const auto model = unwrap(engine->load_model(source));
  double peak_gb = 0;
  const auto sampled = [&](int count) {
    const PeakSampler peak([](std::int64_t used) { stage_peak = std::max<std::int64_t>(stage_peak, used); });
    for (int i = 0; i < count; ++i) unwrap(draw(*model));
    peak_gb = std::max(peak_gb, peak.gb());
  };
  sampled(2);
  std::vector<double> images, steps;
  for (int i = 0; i < 3; ++i) {
    const Image image = unwrap(draw(*model));
    images.push_back(image.seconds);
    steps.insert(steps.end(), image.steps.begin() + 2, image.steps.end());
  }
  sampled(1);
  const auto report = model->memory();
  pipeline::release_cached_memory(gpu);
  const auto info = pipeline::memory_info(gpu);
  std::fprintf(stderr, "driver: %.2f GB\n",
               static_cast<double>(info.total - info.free - pipeline::memory_use(gpu).now) / 1e9);
  std::fprintf(stderr, "%s: plan %s, predicted %.2f GB and observed %.2f GB beside weights, %.2f GB of tensors\n",
               offload.c_str(), report.plan.c_str(), static_cast<double>(report.predicted_bytes) / 1e9,
               static_cast<double>(report.observed_bytes) / 1e9,
               static_cast<double>(pipeline::memory_use(gpu).peak) / 1e9);
  return {median(images), median(steps), peak_gb};
}

double since_process_start() {
  std::ifstream stat("/proc/self/stat"), uptime("/proc/uptime");
  std::string field;
  for (int i = 0; i < 22; ++i) stat >> field;
  double now = 0;
  uptime >> now;
  return now - std::stod(field) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

void boot(const Formats& formats) {
  const auto engine = open_engine("auto");
  row("engine_s", since_process_start(), "s");
  pipeline::ModelSource source{"flux", flags["--model"]};
  source.quantize = formats;
  const auto start = Clock::now();
  const auto model = unwrap(engine->load_model(source));
  row("loaded_s", since(start), "s");
  for (const auto& [part, took] : model->info().load_times)
    row(part + "_s", static_cast<double>(took.count()) / 1e6, "s");
  unwrap(draw(*model));
  row("start_to_png_s", since_process_start(), "s");
}

void offload(const Formats& formats) {
  const auto measured = [&](const std::string& name) {
    const Figures f = measure(name, formats);
    pipeline::release_cached_memory(gpu);
    const std::string prefix = name == "none" ? "resident_" : name == "model" ? "encoders_leave_" : "";
    row(prefix + "peak_gb", f.peak_gb, "GB");
    row(prefix + "prompt_to_png_s", f.image_s, "s");
    row(prefix + "step_ms", f.step_s * 1e3, "ms");
    return f;
  };
  const Figures block = measured("block"), resident = measured("none");
  row("image_ratio", block.image_s / resident.image_s, "x");
  row("step_ratio", block.step_s / resident.step_s, "x");
  if (formats == kNf4) {
    const Figures model = measured("model");
    row("encoders_leave_step_ratio", model.step_s / resident.step_s, "x");
  }
  row("copy_gb_per_s", pipeline::copy_bandwidth(gpu) / 1e9, "GB/s");
}

void limit12() {
  const Figures f = measure("auto", {{"*", "auto"}}, 12);
  row("prompt_to_png_s", f.image_s, "s");
  row("step_ms", f.step_s * 1e3, "ms");
  row("peak_gb", f.peak_gb, "GB");
}

void contain() {
  constexpr int kJobs = 200, kTooLarge = 10, kJobSteps = 4;
  const bool cpu = gpu.is_cpu();
  const auto engine = open_engine("auto", cpu ? 0.1 : 26);
  pipeline::ModelSource source{"flux", flags["--model"]};
  if (!cpu) source.quantize = kFp8;
  const auto model = unwrap(engine->load_model(source));
  const std::array<int, 4> sides = cpu ? std::array{64, 96, 128, 160} : std::array{256, 384, 512, 640};
  const int too_large = cpu ? 1024 : 8192;  // no plan fits: one that fits would run for many seconds
  for (const int side : sides) unwrap(draw(*model, side, kJobSteps));
  std::mt19937 random(20261125);
  std::vector<int> order;
  for (int i = 0; i < kJobs; ++i) order.push_back(sides[random() % 4]);
  int failed = 0;
  const auto all = [&] {
    const auto start = Clock::now();
    for (const int side : order) {
      if (const auto image = draw(*model, side, kJobSteps); !image) {
        if (++failed == 1) std::fprintf(stderr, "%s\n", image.error().message.c_str());
      }
    }
    return since(start);
  };
  const double without = all();
  for (int i = 0; i < kTooLarge; ++i)
    order.insert(order.begin() + static_cast<int>(random() % order.size()), too_large);
  failed = 0;
  const double with = all();
  row("throughput_ratio", without / with, "x");
  row("failed", failed, "jobs");
  row("step_downs", static_cast<double>(model->memory().step_downs), "jobs");
}

// How much longer the first step takes when the model was not on the device.
void switch_models() {
  const auto engine = open_engine("auto", 28);
  pipeline::ModelSource source{"a", flags["--model"]};
  source.quantize = kFp8;
  const auto a = unwrap(engine->load_model(source));
  source.name = "b";
  const auto b = unwrap(engine->load_model(source));
  for (int i = 0; i < 2; ++i) unwrap(draw(*a, 512, 2)), unwrap(draw(*b, 512, 2));
  std::vector<double> first, again;
  for (int i = 0; i < 3; ++i)
    for (pipeline::Model* model : {a.get(), b.get()}) {
      first.push_back(unwrap(draw(*model, 512, 2)).steps[0]);
      again.push_back(unwrap(draw(*model, 512, 2)).steps[0]);
    }
  const double bytes = static_cast<double>(a->memory().bytes), bandwidth = pipeline::copy_bandwidth(gpu);
  row("models_s", median(first) - median(again), "s");
  row("bytes_over_bandwidth_s", bytes / bandwidth, "s");
  row("ratio", (median(first) - median(again)) * bandwidth / bytes, "x");
}

}  // namespace
}  // namespace ditfleet::bench

int main(int argc, char** argv) {
  using namespace ditfleet::bench;
  run(argc, argv,
      {{"offload_bf16", [] { offload({}); }},
       {"offload_fp8", [] { offload(kFp8); }},
       {"offload_nf4", [] { offload(kNf4); }},
       {"limit12", limit12},
       {"boot_bf16", [] { boot({}); }},
       {"boot_fp8",
        [] {
          boot({{"transformer", "fp8"}});
        }},
       {"boot_nf4", [] { boot(kNf4); }},
       {"contain", contain},
       {"switch", switch_models}});
}
