// Measures videos on a GPU with folders of Wan 2.2's sizes (make_wan_size.py). gpu.sh runs it.
//
//   wan_gpu_bench SCENARIO --model DIR [--quantize FORMAT] [--attention fp8] [--cache DIR] [--mode MODE] [--revision
//   TEXT] [--machine TEXT]
//
// SCENARIO: forward  one transformer without guidance at 832×480: the first step, steady steps with 49 and 81 frames,
//                    the first step with 61 frames. The sampler's step is part of them
//           request  from a prompt to an MP4: 832×480, 81 frames, four steps without guidance and with an adapter of
//                    rank 64 for each transformer; the VAE, the file, and what the first step of the second
//                    transformer takes longer
//           cfg      the same with 40 steps and guidance, without adapters
//           ti2v     TI2V-5B without guidance at 1280×704 with 121 frames: a step, and the VAE
//           limit32  memory.limit 32 GiB: steps of both transformers at 832×1216 with 61 and 81 frames, the peak
//           limit16  the same with 16 GiB
//           none     the same without a limit
//
// Each also gives the time to load the folder. A peak is total - free memory of the device in 10⁹ bytes, sampled every
// 5 ms.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "pipeline/device/failure.h"
#include "pipeline/device/memory.h"
#include "pipeline/engine.h"
#include "pipeline/families/wan/wan.h"
#include "shared/core/json.h"
#include "shared/kernel_cache/cache.h"
#include "shared/media/writer.h"
#include "tests/bench/flux_size.h"

namespace ditfleet::bench {
namespace {

using Clock = std::chrono::steady_clock;
using pipeline::unwrap;

struct Request {
  int frames, steps;
  int width = 832, height = 480;
  double guidance = 1;
  bool adapters = false, file = true;
};

struct Video {
  std::vector<double> steps;
  std::map<std::string, double> phases;
  double file_s = 0, seconds = 0, peak_gb = 0, state_s = 0, state_mb = 0;
};

struct Loaded {
  std::unique_ptr<pipeline::Engine> engine;
  std::unique_ptr<pipeline::Model> model;
};

// "", "_fp8" or "_fp8_attention8", for names of scenarios.
std::string formats() {
  return (flags["--quantize"].empty() ? "" : "_" + flags["--quantize"]) +
         (flags["--attention"].empty() ? "" : "_attention8");
}

Loaded load(double limit_gib = 0, int lora_slots = 0) {
  pipeline::EngineOptions o;
  o.device = flags["--device"];
  o.compile = options();
  o.kernel_cache = open_cache();
  o.memory = {"auto", static_cast<std::int64_t>(limit_gib * (1 << 30)), 0};
  o.lora_slots = lora_slots;
  auto engine = unwrap(pipeline::Engine::create(o, {&pipeline::wan_family()}));
  pipeline::ModelSource source{"wan", flags["--model"]};
  if (!flags["--quantize"].empty()) source.quantize = {{"transformer", flags["--quantize"]}};
  source.attention = flags["--attention"];
  const auto start = Clock::now();
  auto model = unwrap(engine->load_model(source));
  const std::string folder = std::filesystem::path(flags["--model"]).filename();
  row("loaded_s", since(start), "s", "load_" + folder + formats());
  return {std::move(engine), std::move(model)};
}

Video generate(pipeline::Model& model, const Request& r, bool decode = true) {
  static int prompts = 0;
  pipeline::GenerationRequest request;
  request.prompt = "video number " + std::to_string(++prompts);
  request.seed = prompts;
  request.fields.set("width", r.width);
  request.fields.set("height", r.height);
  request.fields.set("frames", r.frames);
  request.fields.set("num_inference_steps", r.steps);
  request.fields.set("guidance_scale", r.guidance);
  if (r.adapters) {
    const std::string folder = flags["--model"] + "/adapters/";
    request.loras = {{.path = folder + "high.safetensors", .expert = job::Expert::kHigh},
                     {.path = folder + "low.safetensors", .expert = job::Expert::kLow}};
  }
  PeakSampler peak;
  Video video;
  const auto start = Clock::now();
  auto generation = unwrap(model.encode(request));
  auto last = Clock::now();
  unwrap(model.denoise(*generation, [&](const pipeline::StepProgress& progress) {
    video.steps.push_back(since(std::exchange(last, Clock::now())));
    if (progress.step == r.steps) {
      // What a worker keeps from time to time. The first call waits for the device.
      for (int i = 0; i < 2; ++i) {
        const auto kept = Clock::now();
        video.state_mb = static_cast<double>(unwrap(progress.state(std::int64_t{1} << 30)).size()) / 1e6;
        video.state_s = since(kept);
      }
    }
    return true;
  }));
  if (decode) {
    const auto writer = r.file ? media::open_writer(job::OutputFormat::kMp4, 90) : nullptr;
    const pipeline::Media decoded_video = unwrap(model.decode(*generation, [&](const pipeline::Media& so_far) {
      if (writer) writer->add(so_far);
    }));
    const auto decoded = Clock::now();
    if (writer) unwrap(writer->finish(decoded_video, ""));
    video.file_s = since(decoded);
  }
  video.seconds = since(start);
  video.peak_gb = peak.stop();
  for (const auto& [phase, us] : generation->phases_us()) video.phases[phase] = static_cast<double>(us) / 1e6;
  std::fprintf(stderr, "%d frames, %dx%d: ", r.frames, r.width, r.height);
  for (const double s : video.steps) std::fprintf(stderr, "%.3f ", s);
  for (const auto& [phase, s] : video.phases) std::fprintf(stderr, "%s %.3f ", phase.c_str(), s);
  std::fprintf(stderr, "file %.3f, %.2f s, peak %.2f GB, plan %s\n", video.file_s, video.seconds, video.peak_gb,
               model.memory().plan.c_str());
  return video;
}

double median_from(const Video& video, std::size_t first) {
  return median({video.steps.begin() + static_cast<std::ptrdiff_t>(first), video.steps.end()});
}

void forward() {
  const Loaded wan = load();
  const std::string suffix = formats();
  const Video first = generate(*wan.model, {49, 7}, false), longer = generate(*wan.model, {81, 5}, false),
              other = generate(*wan.model, {61, 4}, false);
  row("49_s", median_from(first, 2), "s", "forward" + suffix);
  row("81_s", median_from(longer, 1), "s", "forward" + suffix);
  row("peak_gb", longer.peak_gb, "GB", "forward" + suffix);
  row("extra_s", first.steps[0] - median_from(first, 2), "s", "cold" + suffix);
  row("81_state_s", longer.state_s, "s", "forward" + suffix);
  row("81_state_mb", longer.state_mb, "MB", "forward" + suffix);
  row("new_frames_extra_s", other.steps[0] - median_from(other, 1), "s", "warm" + suffix);
}

// Of a video with two transformers: the steps, and the first one of the second transformer less a steady one. It is the
// slowest step after the first.
void videos(int steps, double guidance, bool adapters) {
  const Loaded wan = load(0, adapters ? 2 : 0);
  generate(*wan.model, {81, 2, 832, 480, guidance, adapters});
  const Video video = generate(*wan.model, {81, steps, 832, 480, guidance, adapters});
  const std::string in = "request" + formats();
  row("480p_81_frames_" + std::to_string(steps) + "_steps_s", video.seconds, "s", in);
  row("peak_gb", video.peak_gb, "GB", in);
  row("extra_s", *std::max_element(video.steps.begin() + 1, video.steps.end()) - median_from(video, 1), "s", "switch");
  row("decode_81_s", video.phases.at("vae"), "s", "vae");
  row("after_last_frame_s", video.file_s, "s", "mp4");
}

void ti2v() {
  const Loaded wan = load();
  const auto draw = [&](int steps) {
    return generate(*wan.model, {.frames = 121, .steps = steps, .width = 1280, .height = 704, .file = false});
  };
  draw(2);
  const Video video = draw(5);
  row("step_121_s", median_from(video, 1), "s", "ti2v" + formats());
  row("decode_121_s", video.phases.at("vae"), "s", "ti2v" + formats());
  row("peak_gb", video.peak_gb, "GB", "ti2v" + formats());
}

void limited(double gib) {
  const Loaded wan = load(gib);
  for (const int frames : {61, 81}) {
    // UniPC with shift 3 of six steps: the first two are at the high noise levels.
    const Video video = generate(*wan.model, {frames, 6, 832, 1216}, frames == 61);
    const std::string size = std::to_string(frames) + "_frames_832x1216_";
    row(size + "high_step_s", video.steps[1], "s");
    row(size + "low_step_s", median_from(video, 4), "s");
    row(size + "peak_gb", video.peak_gb, "GB");
  }
}

}  // namespace
}  // namespace ditfleet::bench

int main(int argc, char** argv) {
  using namespace ditfleet::bench;
  run(argc, argv,
      {{"forward", forward},
       {"request", [] { videos(4, 1, true); }},
       {"cfg", [] { videos(40, 5, false); }},
       {"ti2v", ti2v},
       {"limit32", [] { limited(32); }},
       {"limit16", [] { limited(16); }},
       {"none", [] { limited(0); }}});
}
