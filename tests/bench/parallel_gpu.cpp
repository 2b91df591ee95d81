// Measures several GPUs that share each unit, against one of them. gpu.sh runs it.
//
//   parallel_gpu_bench SCENARIO --model DIR --gpus N [--exchange nccl] [--cache DIR] [--mode MODE] [--revision TEXT]
//     [--machine TEXT]
//
// SCENARIO: flux  a folder of FLUX.1-dev's size: 28 steps at 1024×1024, steps at 512×512, the time to load it
//           z_image  a folder of Z-Image's size: a step at 1024×1024
//           wan   a folder of Wan 2.2 A14B's size with one transformer: a step with guidance of 81 frames at 832×480
//
// The GPUs exchange attention's rows by copy engines, or with --exchange nccl by NCCL; the names of those rows end in
// _nccl. The weights are in the page cache when the time to load them is measured.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

#include "pipeline/device/failure.h"
#include "pipeline/device/memory.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/wan/wan.h"
#include "pipeline/families/z_image/z_image.h"
#include "shared/kernel_cache/cache.h"
#include "tests/bench/flux_size.h"
#include "worker/ranks/leader.h"

namespace ditfleet::bench {
namespace {

using Clock = std::chrono::steady_clock;
using pipeline::unwrap;

int gpus = 2;
std::shared_ptr<worker::RankProcesses> ranks;

Result<std::unique_ptr<pipeline::Engine>> create(const pipeline::RankOptions& place) {
  pipeline::EngineOptions o;
  o.device = flags["--device"];
  o.compile = options();
  o.compile.backend = "auto";  // in the other ranks options() knows no GPU
  o.kernel_cache = open_cache();
  o.ranks = place;
  return pipeline::Engine::create(o, {&pipeline::flux_family(), &pipeline::wan_family(), &pipeline::z_image_family()});
}

struct Request {
  int width, height, steps, frames = 0;
};

// Seconds of each step.
std::vector<double> generate(pipeline::Model& model, const Request& r) {
  pipeline::GenerationRequest request;
  request.prompt = "a lighthouse";
  request.fields.set("width", r.width);
  request.fields.set("height", r.height);
  request.fields.set("num_inference_steps", r.steps);
  if (r.frames > 0) {
    request.fields.set("frames", r.frames);
    request.fields.set("guidance_scale", 5.0);
  }
  auto generation = unwrap(model.encode(request));
  std::vector<double> steps;
  auto last = Clock::now();
  unwrap(model.denoise(*generation, [&](const pipeline::StepProgress&) {
    steps.push_back(since(std::exchange(last, Clock::now())));
    return true;
  }));
  for (const double s : steps) std::fprintf(stderr, "%.4f ", s);
  std::fprintf(stderr, "\n");
  return steps;
}

double sum(const std::vector<double>& values) {
  double total = 0;
  for (const double value : values) total += value;
  return total;
}

using Measure = std::map<std::string, double> (*)(pipeline::Model&);

std::map<std::string, double> flux(pipeline::Model& model) {
  for (const int side : {1024, 512}) generate(model, {side, side, 2});
  const auto large = generate(model, {1024, 1024, kSteps}), small = generate(model, {512, 512, kSteps});
  return {{"28_steps", sum(large)}, {"step_512", median(small)}};
}

std::map<std::string, double> wan(pipeline::Model& model) {
  generate(model, {832, 480, 1, 81});
  return {{"step_81", median(generate(model, {832, 480, 3, 81}))}};
}

std::map<std::string, double> z_image(pipeline::Model& model) {
  generate(model, {1024, 1024, 2});
  return {{"step_1024", median(generate(model, {1024, 1024, 8}))}};
}

// On one GPU, then on all.
void compare(Measure measure) {
  const std::string load = scenario == "flux" ? "load" : "load_" + scenario;
  const std::string by = flags["--exchange"] == "nccl" ? "_nccl" : "";
  std::map<std::string, double> alone;
  for (const int count : {1, gpus}) {
    auto engine = count == 1 ? unwrap(create({})) : unwrap(ranks->create_engine());
    const auto start = Clock::now();
    auto model = unwrap(engine->load_model({"model", flags["--model"]}));
    const double loaded = since(start);
    auto seconds = measure(*model);
    const std::string of = "_" + std::to_string(count) + (count > 1 ? by : "");
    for (const auto& [name, s] : seconds) row(name + of + "_s", s, "s");
    row("weights" + of + "_s", loaded, "s", load);
    seconds["weights"] = loaded;
    if (count == 1) alone = seconds;
    for (const auto& [name, s] : seconds)
      if (count > 1) row(name + "_ratio" + of, s / alone.at(name), "1", name == "weights" ? load : scenario);
    model.reset();
    engine.reset();
    pipeline::release_cached_memory(gpu);
  }
}

}  // namespace
}  // namespace ditfleet::bench

int main(int argc, char** argv) {
  using namespace ditfleet;
  using namespace ditfleet::bench;
  for (int i = 2; i + 1 < argc; i += 2) {
    flags[argv[i]] = argv[i + 1];
    if (std::strcmp(argv[i], "--gpus") == 0) gpus = std::atoi(argv[i + 1]);
  }
  flags.emplace("--gpus", "2");
  flags.emplace("--exchange", "");
  // Before this process has threads or a GPU.
  const pipeline::RankOptions place{
      .size = gpus, .wait = std::chrono::seconds(60), .copy_engines = flags["--exchange"] != "nccl"};
  ranks = unwrap(worker::RankProcesses::start(place, unwrap(pipeline::Engine::create_rank_memory(gpus, place.wait)),
                                              bench::create));
  run(argc, argv,
      {{"flux", [] { compare(flux); }}, {"wan", [] { compare(wan); }}, {"z_image", [] { compare(z_image); }}});
}
