#include "worker/models/model_timings.h"

#include <algorithm>

#include "shared/telemetry/metrics.h"
#include "shared/telemetry/process.h"

namespace ditfleet::worker {
namespace {

double seconds(std::chrono::microseconds time) { return static_cast<double>(time.count()) * 1e-6; }

const telemetry::Histograms& phases() {
  static const telemetry::Histograms series("ditfleet_phase_seconds");
  return series;
}

const telemetry::Counters& step_downs() {
  static const telemetry::Counters series("ditfleet_memory_step_downs_total");
  return series;
}

}  // namespace

void record_load(const pipeline::ModelInfo& info) {
  static const telemetry::Gauges series("ditfleet_model_load_seconds");
  for (const auto& [part, time] : info.load_times) series({info.name, part}).Set(seconds(time));
  // A rate needs a first sample of 0: a slow worker may run few units.
  for (const char* phase : {"adapter", "text", "wait", "denoise", "vae", "encode", "store"})
    phases()({info.name, phase});
  step_downs()({info.name});
}

void record_warm_up(const std::string& model, const std::string& class_key, const PartTimes& parts) {
  static const telemetry::Gauges series("ditfleet_warmup_seconds");
  for (const auto& [part, time] : parts) series({model, class_key, part}).Set(seconds(time));
}

void record_memory(const std::string& model, const pipeline::MemoryReport& report) {
  static const telemetry::Gauges predicted("ditfleet_memory_predicted_bytes");
  static const telemetry::Gauges observed("ditfleet_memory_observed_bytes");
  static const telemetry::Counters loads("ditfleet_model_loads_total");
  if (report.limits.empty()) return;
  predicted({model}).Set(static_cast<double>(report.predicted_bytes));
  observed({model}).Set(static_cast<double>(report.observed_bytes));
  const auto raise = [&](const telemetry::Counters& counters, std::int64_t to) {
    auto counter = counters({model});
    counter.Increment(std::max(0.0, static_cast<double>(to) - counter.Value()));
  };
  raise(loads, report.loads);
  raise(step_downs(), report.step_downs);
}

void record_unit(const std::string& model, const std::map<std::string, std::int64_t>& phases_us,
                 const std::map<std::string, std::int64_t>& device_phases_us, const std::string& plan) {
  static const telemetry::Histograms device("ditfleet_device_phase_seconds");
  static const telemetry::Counters plans("ditfleet_memory_plans_total");
  for (const auto& [phase, us] : phases_us) phases()({model, phase}).Observe(static_cast<double>(us) * 1e-6);
  for (const auto& [phase, us] : device_phases_us) device({model, phase}).Observe(static_cast<double>(us) * 1e-6);
  plans({model, plan.empty() ? "resident" : plan}).Increment();
}

void record_boot(const char* part) {
  static const telemetry::Gauges boot("ditfleet_boot_seconds");
  boot({part}).Set(telemetry::process_age_s());
}

std::string text_of(const PartTimes& parts) {
  std::string text;
  for (const auto& [part, time] : parts)
    text += (text.empty() ? "" : ", ") + part + " " + std::to_string((time.count() + 500) / 1000) + " ms";
  return text;
}

std::chrono::microseconds StepTimer::ended(const pipeline::StepProgress& progress) {
  static const telemetry::Histograms series("ditfleet_step_seconds");
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun_);
  series({model_, progress.step == 1 ? "first" : progress.skipped ? "skipped" : "steady"}).Observe(seconds(took));
  return took;
}

}  // namespace ditfleet::worker
