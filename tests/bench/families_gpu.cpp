// Measures a folder of any image family on a GPU. gpu.sh families runs it.
//
//   families_gpu_bench SCENARIO --model DIR --steps N --name NAME [--size SIDE] [--pictures N] [--negative TEXT]
//                      [--words N] [--lora FILE] [--quantize FORMAT] [--attention fp8] [--limit GIB] [--cache DIR]
//                      [--revision TEXT]
//                      [--machine TEXT]
//
// SCENARIO: image  loading, the first step, a step, from a prompt to a PNG alone and back to back with the stages of
//                  images on three threads, as a worker runs them; then a new size; and the peak of memory
//           once   a step and from a prompt to a PNG, of one image after one of 3 steps; then a new size, and with
//                  --most N a request of N pictures; and the peak of memory
//           gate     the cosine between the pixels of images in bf16 and in FORMAT, with 8-bit attention and both
//           profile  one image after two others, for a profiler
//
// Rows are of the scenario NAME_FORMAT. --size: 1024 if left out. --pictures: inputs of each request, of 1024×1024.
// --words: more of both prompts. --limit: memory.limit, with the plan that `auto` chooses; with --quantize auto, also
// the formats.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>

#include "pipeline/device/failure.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/flux2/flux2.h"
#include "pipeline/families/qwen_image/qwen_image.h"
#include "pipeline/families/z_image/z_image.h"
#include "shared/core/background_threads.h"
#include "shared/kernel_cache/cache.h"
#include "shared/media/writer.h"
#include "tests/bench/flux_size.h"

namespace ditfleet::bench {
namespace {

using Clock = std::chrono::steady_clock;
using pipeline::unwrap;

// Fewer images of many steps.
int images() { return std::atoi(flags["--steps"].c_str()) > 10 ? 2 : 8; }

class Folder {
 public:
  Folder() {
    pipeline::EngineOptions o;
    o.device = flags["--device"];
    o.compile = options();
    o.kernel_cache = open_cache();
    o.lora_slots = flags["--lora"].empty() ? 0 : 1;
    o.memory.limit = static_cast<std::int64_t>(std::atof(flags["--limit"].c_str()) * (1 << 30));
    engine_ = unwrap(pipeline::Engine::create(o, {&pipeline::flux_family(), &pipeline::flux2_family(),
                                                  &pipeline::qwen_image_family(), &pipeline::z_image_family()}));
    pipeline::ModelSource source{"model", flags["--model"]};
    if (const std::string& format = flags["--quantize"]; !format.empty())
      source.quantize[format == "auto" ? "*" : "transformer"] = format;
    source.attention = flags["--attention"];
    model_ = unwrap(engine_->load_model(source));
  }

  std::unique_ptr<pipeline::Generation> encode() { return encode(side_, side_, number("--steps"), pictures()); }
  std::unique_ptr<pipeline::Generation> encode(int width, int height, int steps, int pictures) {
    pipeline::GenerationRequest request;
    request.prompt = "picture number " + std::to_string(++prompts_);  // a new prompt, so that no embedding is reused
    std::string more;
    for (int i = 0; i < number("--words"); ++i) more += " star";
    request.prompt += more;
    request.seed = prompts_;
    request.fields.set("width", width);
    request.fields.set("height", height);
    request.fields.set("num_inference_steps", steps);
    if (!flags["--negative"].empty()) request.fields.set("negative_prompt", flags["--negative"] + more);
    if (!flags["--lora"].empty()) request.loras = {{.path = flags["--lora"]}};
    request.images.assign(static_cast<std::size_t>(pictures), picture_);
    return unwrap(model_->encode(request));
  }
  // `steps`: gets the seconds of each step. `state_s`: gets those of what a worker keeps from time to time.
  pipeline::Media draw(pipeline::Generation& generation, std::vector<double>* steps = nullptr,
                       double* state_s = nullptr) {
    auto last = Clock::now();
    unwrap(model_->denoise(generation, [&](const pipeline::StepProgress& progress) {
      if (steps) steps->push_back(since(std::exchange(last, Clock::now())));
      for (int i = 0; state_s && progress.step == progress.total && i < 2; ++i) {  // the first waits for the device
        const auto kept = Clock::now();
        unwrap(progress.state(std::int64_t{1} << 30));
        *state_s = since(kept);
      }
      return true;
    }));
    return unwrap(model_->decode(generation));
  }
  static std::size_t png(const pipeline::Media& image) {
    return unwrap(media::encode(image, job::OutputFormat::kPng, 100)).size();
  }
  double compiles() const { return static_cast<double>(engine_->region_counts().compiles); }
  const pipeline::Model& model() const { return *model_; }
  static int number(const char* flag) { return std::atoi(flags[flag].c_str()); }
  static int pictures() { return number("--pictures"); }

 private:
  std::unique_ptr<pipeline::Engine> engine_;
  std::unique_ptr<pipeline::Model> model_;
  // Grey waves.
  static std::shared_ptr<const pipeline::Media> painted() {
    pipeline::Media made{1024, 1024, 1, 0, std::vector<std::uint8_t>(3 << 20)};
    for (std::size_t i = 0; i < made.rgb.size(); ++i)
      made.rgb[i] = static_cast<std::uint8_t>(128 + 100 * std::sin(static_cast<double>(i % 3072 + i / 3072) / 200));
    return std::make_shared<const pipeline::Media>(std::move(made));
  }
  const std::shared_ptr<const pipeline::Media> picture_ = painted();
  const int side_ = flags["--size"].empty() ? 1024 : number("--size");
  int prompts_ = 0;
};

double back_to_back(Folder& folder) {
  BackgroundThreads text("text", 1), device("device", 1), encoder("png", 1);
  const auto encode = [&] { return text.run([&] { return folder.encode(); }); };
  return first_s([&] {
           std::vector<std::future<std::size_t>> files;
           auto next = encode();
           for (int i = 0; i < images(); ++i) {
             auto ready = next.get();
             if (i + 1 < images()) next = encode();
             auto image = device.run([&, g = std::shared_ptr(std::move(ready))] { return folder.draw(*g); }).get();
             files.push_back(encoder.run([i = std::move(image)] { return Folder::png(i); }));
           }
           for (auto& file : files) file.get();
         }) /
         images();
}

std::string scenario_of_flags() {
  return flags["--name"] + "_" + (flags["--quantize"].empty() ? "bf16" : flags["--quantize"]) +
         (flags["--attention"].empty() ? "" : "_attention8") + (flags["--lora"].empty() ? "" : "_lora");
}

void once() {
  scenario = scenario_of_flags() + (flags["--limit"].empty() ? "" : "_limit" + flags["--limit"]);
  PeakSampler peak;
  Folder folder;
  const int side = Folder::number("--size") > 0 ? Folder::number("--size") : 1024, pictures = Folder::pictures();
  folder.draw(*folder.encode(side, side, 3, pictures));
  std::vector<double> steps;
  row("prompt_to_png_s", first_s([&] { Folder::png(folder.draw(*folder.encode(), &steps)); }), "s");
  steps.erase(steps.begin());
  row("step_ms", median(steps) * 1e3, "ms");
  row("peak_gib", peak.stop() * 1e9 / (1 << 30), "GiB");
  std::fprintf(stderr, "plan %s\n", folder.model().memory().plan.c_str());
  const double before = folder.compiles();
  folder.draw(*folder.encode(768, 1360, 3, pictures));
  if (const int most = Folder::number("--most"); most > 0) folder.draw(*folder.encode(side, side, 3, most));
  row("new_size_compiles", folder.compiles() - before, "programs");
}

void image() {
  scenario = scenario_of_flags() + (flags["--limit"].empty() ? "" : "_limited");
  PeakSampler peak;
  Folder folder;
  double compile = 0;
  for (const auto& [part, took] : folder.model().info().load_times) {
    if (part == "compile") compile = static_cast<double>(took.count()) / 1e6;
    std::fprintf(stderr, "%s %.3f s\n", part.c_str(), static_cast<double>(took.count()) / 1e6);
  }
  const auto image = [&](std::vector<double>* steps = nullptr) { folder.draw(*folder.encode(), steps); };
  std::vector<double> steps;
  image(&steps);
  row("compile_and_first_step_s", compile + steps.front(), "s");
  const bool few = images() > 2;
  for (int i = 0; i < (few ? 2 : 1); ++i) image();
  steps.clear();
  for (int i = 0; i < (few ? 3 : 1); ++i) {
    std::vector<double> of_image;
    image(&of_image);
    steps.insert(steps.end(), of_image.begin() + 1, of_image.end());
  }
  row("step_ms", median(steps) * 1e3, "ms");
  double state_s = 0;
  folder.draw(*folder.encode(), nullptr, &state_s);
  row("state_ms", state_s * 1e3, "ms");
  const auto whole = [&] { Folder::png(folder.draw(*folder.encode())); };
  row("peak_gib", peak.stop() * 1e9 / (1 << 30), "GiB");
  row("prompt_to_png_s", steady_s(whole, few ? 5 : 3), "s");
  row("back_to_back_s", back_to_back(folder), "s");
  auto generation = folder.encode();
  std::fprintf(stderr, "plan %s\n", folder.model().memory().plan.c_str());
  for (const auto& [stage, us] : generation->device_phases_us())
    std::fprintf(stderr, "%s %.2f ms\n", stage.c_str(), static_cast<double>(us) / 1e3);
  const double before = folder.compiles();
  std::vector<double> first, second;
  folder.draw(*folder.encode(768, 1360, Folder::number("--steps"), Folder::pictures()), &first);
  folder.draw(*folder.encode(768, 1360, Folder::number("--steps"), Folder::pictures()), &second);
  row("new_size_extra_s", first.front() - median(second), "s");
  row("new_size_compiles", folder.compiles() - before, "programs");
}

// Images of images() prompts, as numbers from -1 to 1.
std::vector<std::vector<float>> images_in(const std::string& quantize, const std::string& attention) {
  flags["--quantize"] = quantize;
  flags["--attention"] = attention;
  Folder folder;
  std::vector<std::vector<float>> made;
  for (int i = 0; i < images(); ++i) {
    auto& pixels = made.emplace_back();
    for (const auto byte : folder.draw(*folder.encode()).rgb) pixels.push_back(static_cast<float>(byte) / 127.5F - 1);
  }
  return made;
}

void gate() {
  const std::string format = flags["--quantize"];
  const auto exact = images_in("", "");
  for (const auto& [quantize, attention] : {std::pair(format, ""), {std::string(), "fp8"}, {format, "fp8"}}) {
    const auto rounded = images_in(quantize, attention);
    double worst = 1;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      const auto dot = [](const auto& a, const auto& b) {
        return std::inner_product(a.begin(), a.end(), b.begin(), 0.);
      };
      worst =
          std::min(worst, dot(exact[i], rounded[i]) / std::sqrt(dot(exact[i], exact[i]) * dot(rounded[i], rounded[i])));
    }
    scenario = flags["--name"] + (quantize.empty() ? "" : "_" + quantize) + (*attention ? "_attention8" : "");
    row("image_cosine", worst, "1");
  }
}

void profile() {
  Folder folder;
  for (int i = 0; i < 3; ++i) folder.draw(*folder.encode());
}

}  // namespace
}  // namespace ditfleet::bench

int main(int argc, char** argv) {
  using namespace ditfleet::bench;
  for (const char* flag :
       {"--steps", "--name", "--limit", "--pictures", "--most", "--size", "--negative", "--words", "--lora"})
    flags.emplace(flag, "");
  run(argc, argv, {{"image", image}, {"once", once}, {"gate", gate}, {"profile", profile}});
}
