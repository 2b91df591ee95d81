// Measures one configuration and appends one row to a CSV. nightly.sh runs it, a process per configuration.
//
//   nightly_bench --csv FILE --model DIR [--mode MODE] [--format FORMAT] [--offload OFFLOAD] [--size WIDTHxHEIGHT]
//                 [--steps N] [--text-tokens N] [--device cpu|cuda|cuda:N] [--revision TEXT] [--machine TEXT]
//                 [--error TEXT]
//
//   MODE     default | reduce-overhead | max-autotune | max-autotune-no-cudagraphs | eager
//   FORMAT   fp32 | bf16 | fp8 (transformer) | nf4 (transformer and text_encoder_2)
//   OFFLOAD  none | model | block | auto
//   --error  measures nothing and records this error
//
// Exit status: 0; 1: the row has an error; 2: no row.
#include <torch/headeronly/version.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>

#include "pipeline/device/memory.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "shared/media/writer.h"

namespace ditfleet::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kImages = 5;  // measured images, after the first one

std::map<std::string, std::string> flags{{"--csv", ""},        {"--model", ""},           {"--mode", "default"},
                                         {"--format", "bf16"}, {"--offload", "none"},     {"--size", ""},
                                         {"--steps", "4"},     {"--text-tokens", "512"},  {"--device", "cpu"},
                                         {"--error", ""},      {"--revision", "unknown"}, {"--machine", "unknown"}};

struct Figures {
  double first_step_s = 0, steady_step_s = 0, image_s = 0, load_s = 0, compile_s = 0;
  std::int64_t peak_bytes = 0, model_bytes = 0;
  std::uint64_t recompiles = 0, fallbacks = 0;
};

template <class T>
T get(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message);
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

pipeline::EngineOptions engine_options() {
  const std::string &mode = flags["--mode"], &format = flags["--format"];
  pipeline::EngineOptions options;
  options.device = flags["--device"];
  if (format == "fp32" || format == "bf16") options.dtype = format;
  options.compile.backend = mode == "eager" ? "eager" : options.device == "cpu" ? "cpu_jit" : "nvrtc";
  if (mode != "eager") options.compile.mode = mode;
  options.memory.offload = flags["--offload"];
  return options;
}

pipeline::ModelSource source() {
  const std::string& format = flags["--format"];
  pipeline::ModelSource source{"nightly", flags["--model"]};
  if (format == "fp8" || format == "nf4") source.quantize["transformer"] = format;
  if (format == "nf4") source.quantize["text_encoder_2"] = format;
  return source;
}

// Generates images of one size.
class Images {
 public:
  Images(pipeline::Model& model, int width, int height) : model_(model), width_(width), height_(height) {}

  // From a new prompt, so that no embedding is reused, to a PNG.
  void draw() {
    pipeline::GenerationRequest request;
    request.prompt = "picture number " + std::to_string(seconds_.size()) + " of " + std::to_string(width_);
    request.fields.set("width", width_);
    request.fields.set("height", height_);
    request.fields.set("num_inference_steps", std::stoi(flags["--steps"]));
    request.fields.set("max_sequence_length", std::stoi(flags["--text-tokens"]));
    const auto start = Clock::now();
    const auto generation = get(model_.encode(request));
    steps_.emplace_back();
    auto begun = Clock::now();
    get(model_.denoise(*generation, [&](const pipeline::StepProgress&) {
      steps_.back().push_back(since(begun));
      begun = Clock::now();
      return true;
    }));
    get(media::encode(get(model_.decode(*generation)), job::OutputFormat::kPng, 100));
    seconds_.push_back(since(start));
  }

  double first_step_s() const { return steps_.front().front(); }
  // Medians without the first image, and of steps also without each image's first.
  double steady_step_s() const {
    std::vector<double> steady;
    for (std::size_t i = 1; i < steps_.size(); ++i) steady.insert(steady.end(), steps_[i].begin() + 1, steps_[i].end());
    return median(steady);
  }
  double image_s() const { return median({seconds_.begin() + 1, seconds_.end()}); }

 private:
  pipeline::Model& model_;
  int width_, height_;
  std::vector<std::vector<double>> steps_;  // seconds of each image's steps
  std::vector<double> seconds_;             // of each image
};

// On a CPU the most bytes of tensors. On a GPU the bytes in use on the device as the driver reports them, which include
// other processes, the driver's own memory and what LibTorch keeps for reuse.
std::int64_t peak_bytes(c10::Device device) {
  if (device.is_cpu()) return pipeline::memory_use(device).peak;
  const pipeline::MemoryInfo info = pipeline::memory_info(device);
  return info.total - info.free;
}

Figures measure() {
  int width = 0, height = 0;
  if (std::sscanf(flags["--size"].c_str(), "%dx%d", &width, &height) != 2)
    throw std::runtime_error("--size is \"" + flags["--size"] + "\"; it must be WIDTHxHEIGHT");
  if (std::atoi(flags["--steps"].c_str()) < 2) throw std::runtime_error("--steps must be at least 2");
  const auto engine = get(pipeline::Engine::create(engine_options(), {&pipeline::flux_family()}));
  const c10::Device device(engine->device());
  pipeline::reset_memory_peak(device);
  const auto start = Clock::now();
  const auto model = get(engine->load_model(source()));
  Figures f;
  f.load_s = since(start);
  f.model_bytes = model->info().weight_bytes;
  for (const auto& [part, time] : model->info().load_times)
    if (part == "compile") f.compile_s = std::chrono::duration<double>(time).count();

  Images images(*model, width, height);
  images.draw();
  const std::uint64_t compiles = engine->region_counts().compiles;
  for (int i = 0; i < kImages; ++i) images.draw();
  f.first_step_s = images.first_step_s();
  f.steady_step_s = images.steady_step_s();
  f.image_s = images.image_s();
  f.peak_bytes = peak_bytes(device);

  const int multiple = model->info().size_multiple;
  Images(*model, height, width / 2 / multiple * multiple).draw();  // another size must need no other program
  f.recompiles = engine->region_counts().compiles - compiles;
  f.fallbacks = engine->region_counts().fallbacks;
  return f;
}

std::string cell(std::string text) {
  for (char& c : text) c = c == ',' ? ';' : c == '"' ? '\'' : c == '\n' || c == '\r' ? ' ' : c;
  return text;
}

// Appends the row, or one without figures if there is an error. False: the file cannot be written.
bool append(const Figures& f, const std::string& error) {
  const std::string& file = flags["--csv"];
  std::error_code ignored;
  const bool fresh = !std::filesystem::exists(file, ignored) || std::filesystem::file_size(file, ignored) == 0;
  char now[32];
  const std::time_t t = std::time(nullptr);
  std::strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&t));
  std::ostringstream row;
  row << now << ',' << cell(flags["--revision"]) << ',' << cell(flags["--machine"]) << ",torch " << TORCH_VERSION;
  for (const char* flag : {"--mode", "--format", "--offload", "--size"}) row << ',' << cell(flags[flag]);
  if (error.empty())
    row << ',' << f.first_step_s << ',' << f.steady_step_s << ',' << f.image_s << ',' << f.peak_bytes << ','
        << f.model_bytes << ',' << f.load_s << ',' << f.compile_s << ',' << f.recompiles << ',' << f.fallbacks << ",\n";
  else
    row << ",,,,,,,,,," << cell(error) << '\n';
  std::ofstream out(file, std::ios::app);
  if (fresh)
    out << "date,revision,machine,versions,mode,format,offload,size,first_step_s,steady_step_s,image_s,peak_bytes,"
           "model_bytes,load_s,compile_s,recompiles,fallbacks,error\n";
  out << row.str() << std::flush;
  std::fputs(row.str().c_str(), stdout);
  return static_cast<bool>(out);
}

int run(int argc, char** argv) {
  for (int i = 1; i < argc; i += 2) {
    if (!flags.contains(argv[i]) || i + 1 == argc) {
      std::fprintf(stderr, "nightly_bench: unknown flag or no value: %s; see nightly.cpp\n", argv[i]);
      return 2;
    }
    flags[argv[i]] = argv[i + 1];
  }
  Figures figures;
  std::string error = flags["--error"];
  try {
    if (error.empty()) figures = measure();
  } catch (const std::exception& e) {
    error = e.what();
  }
  if (!append(figures, error)) {
    std::fprintf(stderr, "nightly_bench: cannot write --csv \"%s\"\n", flags["--csv"].c_str());
    return 2;
  }
  return error.empty() ? 0 : 1;
}

}  // namespace
}  // namespace ditfleet::bench

int main(int argc, char** argv) {
  const int status = ditfleet::bench::run(argc, argv);
  std::fflush(nullptr);
  std::_Exit(status);  // CUDA's libraries may be unloaded before their handles are destroyed
}
