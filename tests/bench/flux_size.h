// Shared by the GPU benches: a transformer of FLUX.1-dev's size with random weights, the inputs of a request, CSV rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "pipeline/families/flux/transformer.h"
#include "pipeline/region/options.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::bench {

inline constexpr std::int64_t kText = 512;  // tokens
inline constexpr int kSteps = 28;

// --device --mode --cache --layers DOUBLE,SINGLE --model --quantize --attention --prompts --revision --machine
extern std::map<std::string, std::string> flags;
extern std::string scenario;
extern c10::Device gpu;

// Prints a CSV row: date, revision, machine, versions, system, scenario, metric, value, unit.
void row(const std::string& metric, double value, const char* unit, const std::string& in = scenario);

pipeline::FluxConfig config();
// Weights from N(0, 0.02²), like those of the peer's script; norms are 1. Reserves columns for adapters of this rank.
pipeline::TransformerWeights random_weights(const pipeline::FluxConfig& config, std::int64_t adapter_rank = 0);
std::shared_ptr<kernel_cache::KernelCache> open_cache();  // at --cache; null if empty
region::CompileOptions options();

// Inputs of one request; the size is in pixels.
struct Inputs {
  Inputs(const pipeline::FluxTransformer& flux, int height, int width, int steps = kSteps);
  at::Tensor latents, text, pooled, rope, timesteps;
};

// Samples total - free memory of the device every 5 ms, from construction to stop().
class PeakSampler {
 public:
  // `on_sample`: called with each sample, in bytes, on a thread of its own. May be empty.
  explicit PeakSampler(std::function<void(std::int64_t)> on_sample = {});
  ~PeakSampler() { stop(); }
  PeakSampler(const PeakSampler&) = delete;
  PeakSampler& operator=(const PeakSampler&) = delete;
  double stop();                                                  // the peak in 10⁹ bytes
  double gb() const { return static_cast<double>(peak_) / 1e9; }  // of the samples so far

 private:
  std::atomic<std::int64_t> peak_ = 0;
  std::atomic<bool> done_ = false;
  std::thread thread_;
};

double since(std::chrono::steady_clock::time_point start);  // seconds
void finish();                                              // waits for the GPU
double first_s(const std::function<void()>& step);          // seconds of one run, including the wait for the GPU
double median(std::vector<double> values);
// Median seconds of single steps, each including the wait for the GPU.
double steady_s(const std::function<void()>& step, int rounds);

// Runs the scenario that the command line names and exits. Does not return to main(), because CUDA's libraries may be
// unloaded before their handles are destroyed.
[[noreturn]] void run(int argc, char** argv, const std::map<std::string, void (*)()>& scenarios);

}  // namespace ditfleet::bench
