// Prometheus metrics of models: load, warm-up and step times, and memory:
//   ditfleet_model_load_seconds{model,part}    part: tokenizers, text_encoders, transformer, vae, compile
//   ditfleet_warmup_seconds{model,class,part}  part: text_encoders, transformer_first_step, transformer_steady_step,
//                                              vae, encode
//   ditfleet_memory_predicted_bytes{model}, ditfleet_memory_observed_bytes{model}  beside weights, of the last request
//   ditfleet_model_loads{model}, ditfleet_memory_step_downs{model}
//   ditfleet_step_seconds{model,phase}         phase: first (of a unit; includes all set-up for a new size) or steady
#pragma once

#include <chrono>
#include <string>

#include "pipeline/engine.h"

namespace ditfleet::worker {

using pipeline::PartTimes;

// Thread-safe.
void record_load(const pipeline::ModelInfo& info);
void record_memory(const std::string& model, const pipeline::MemoryReport& report);
void record_warm_up(const std::string& model, const std::string& class_key, const PartTimes& parts);

// "text_encoders 12 ms, vae 3 ms"
std::string text_of(const PartTimes& parts);

// Times the steps of one unit, on the denoising thread. Work in the step callback, such as previews, is not counted.
class StepTimer {
 public:
  explicit StepTimer(std::string model) : model_(std::move(model)) {}
  // Records the step that has just ended and returns its time.
  std::chrono::microseconds ended(int step);
  // Marks the beginning of the next step.
  void begin() { begun_ = std::chrono::steady_clock::now(); }

 private:
  const std::string model_;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

}  // namespace ditfleet::worker
