// What the benches on a GPU share: a transformer of FLUX.1-dev's size with random weights, a request's inputs, rows of
// the result tables.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/families/flux/transformer.h"
#include "pipeline/region/options.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::bench {

inline constexpr std::int64_t kText = 512;  // tokens
inline constexpr int kSteps = 28;

extern std::map<std::string, std::string> flags;  // --mode --cache --layers DOUBLE,SINGLE --revision --machine
extern std::string scenario;
extern c10::Device gpu;

// One row of a result table on stdout: date, revision, machine, versions, system, scenario, metric, value, unit.
void row(const std::string& metric, double value, const char* unit, const std::string& in = scenario);

pipeline::FluxConfig config();
// Weights of N(0, 0.02²), as the peer's script draws them; norms are 1. With room for adapters of this rank.
pipeline::FluxSlots random_slots(const pipeline::FluxConfig& config, std::int64_t adapter_rank = 0);
std::shared_ptr<kernel_cache::KernelCache> open_cache();  // in --cache; null: none
region::CompileOptions options();

// One request's inputs at a size in pixels.
struct Inputs {
  Inputs(const pipeline::FluxTransformer& flux, int height, int width, std::int64_t batch, int steps = kSteps);
  at::Tensor latents, text, pooled, rope, timesteps;
};

double since(std::chrono::steady_clock::time_point start);  // seconds
void finish();                                              // waits for the GPU
double first_s(const std::function<void()>& step);          // one run, waited for
double median(std::vector<double> values);
// Median of single steps, from the host's side of a waited step.
double steady_s(const std::function<void()>& step, int rounds);

// Runs one of the scenarios as the command line says; its exit status. Does not return to main(): CUDA's libraries may
// be gone before their handles are destroyed.
[[noreturn]] void run(int argc, char** argv, const std::map<std::string, void (*)()>& scenarios);

}  // namespace ditfleet::bench
