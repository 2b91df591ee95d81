// Prometheus metrics of models: load, warm-up, phases and steps, and memory (shared/telemetry/metric_table.cpp).
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

#include "pipeline/engine.h"

namespace ditfleet::worker {

using pipeline::PartTimes;

// Thread-safe.
void record_load(const pipeline::ModelInfo& info);
void record_memory(const std::string& model, const pipeline::MemoryReport& report);
// The phases of a unit that succeeded, on the host and on the device, and the plan for the model's weights.
void record_unit(const std::string& model, const std::map<std::string, std::int64_t>& phases_us,
                 const std::map<std::string, std::int64_t>& device_phases_us, const std::string& plan);
// The time since the process started: a part of the start has ended.
void record_boot(const char* part);
void record_warm_up(const std::string& model, const std::string& class_key, const PartTimes& parts);

// "text_encoders 12 ms, vae 3 ms"
std::string text_of(const PartTimes& parts);

// Times the steps of one unit, on the denoising thread. Work in the step callback, such as previews, is not counted.
class StepTimer {
 public:
  explicit StepTimer(std::string model) : model_(std::move(model)) {}
  // Records the step that has just ended and returns its time.
  std::chrono::microseconds ended(const pipeline::StepProgress& progress);
  // Marks the beginning of the next step.
  void begin() { begun_ = std::chrono::steady_clock::now(); }

 private:
  const std::string model_;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

}  // namespace ditfleet::worker
