#include "worker/model_timings.h"

#include "shared/telemetry/metrics.h"

namespace ditfleet::worker {
namespace {

double seconds(std::chrono::microseconds time) { return static_cast<double>(time.count()) * 1e-6; }

const prometheus::Histogram::BucketBoundaries kStepSeconds{0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08,
                                                           0.1,   0.115, 0.13, 0.15, 0.2,  0.3,  0.5,  1,
                                                           1.5,   2.5,   5,    10,   20,   40};

}  // namespace

void record_load(const pipeline::ModelInfo& info) {
  static auto& family =
      telemetry::gauges("ditfleet_model_load_seconds",
                        "Time to load a model, by part (compile: until the programs of its regions are available)");
  for (const auto& [part, time] : info.load_times)
    family.Add({{"model", info.name}, {"part", part}}).Set(seconds(time));
}

void record_warm_up(const std::string& model, const std::string& class_key, const PartTimes& parts) {
  static auto& family = telemetry::gauges("ditfleet_warmup_seconds", "Time to warm up a shape class, by part");
  for (const auto& [part, time] : parts)
    family.Add({{"model", model}, {"class", class_key}, {"part", part}}).Set(seconds(time));
}

void record_memory(const std::string& model, const pipeline::MemoryReport& report) {
  static auto& predicted =
      telemetry::gauges("ditfleet_memory_predicted_bytes",
                        "Predicted peak of device memory beside weights of the last request, in bytes");
  static auto& observed = telemetry::gauges("ditfleet_memory_observed_bytes",
                                            "Peak of device memory beside weights of the last request, in bytes");
  static auto& loads =
      telemetry::gauges("ditfleet_model_loads", "How often weights of the model came from host memory to the device");
  static auto& step_downs = telemetry::gauges(
      "ditfleet_memory_step_downs", "How often a stage ran out of device memory and ran again with another plan");
  if (report.limits.empty()) return;
  predicted.Add({{"model", model}}).Set(static_cast<double>(report.predicted_bytes));
  observed.Add({{"model", model}}).Set(static_cast<double>(report.observed_bytes));
  loads.Add({{"model", model}}).Set(static_cast<double>(report.loads));
  step_downs.Add({{"model", model}}).Set(static_cast<double>(report.step_downs));
}

std::string text_of(const PartTimes& parts) {
  std::string text;
  for (const auto& [part, time] : parts)
    text += (text.empty() ? "" : ", ") + part + " " + std::to_string((time.count() + 500) / 1000) + " ms";
  return text;
}

std::chrono::microseconds StepTimer::ended(int step) {
  static auto& family = telemetry::histograms(
      "ditfleet_step_seconds", "Time per denoising step, by phase (first: of a unit, steady: all others)");
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun_);
  family.Add({{"model", model_}, {"phase", step == 1 ? "first" : "steady"}}, kStepSeconds).Observe(seconds(took));
  return took;
}

}  // namespace ditfleet::worker
