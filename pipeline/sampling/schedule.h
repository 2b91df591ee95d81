// The noise levels of a request, as diffusers' FlowMatchEulerDiscreteScheduler sets them from N equally
// spaced sigmas, with its float32 roundings. Uses no LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/nn/config_file.h"

namespace ditfleet::pipeline {

struct SchedulerConfig {
  std::int64_t num_train_timesteps = 1000;
  double shift = 1.0;
  bool use_dynamic_shifting = false;
  double base_shift = 0.5, max_shift = 1.15;
  std::int64_t base_image_seq_len = 256, max_image_seq_len = 4096;
  bool linear_time_shift = false;  // time_shift_type: linear, not exponential
  std::optional<double> shift_terminal;
  bool invert_sigmas = false;
  bool use_flow_sigmas = false;
  enum class Spacing { kLinear, kKarras, kExponential, kBeta } spacing = Spacing::kLinear;
  std::optional<double> sigma_min, sigma_max;  // bounds of the other spacings; from the schedule if absent
};

// Throws Failure (kDataCorrupt) naming the file and field, also for what diffusers has and this does not: another
// scheduler class, stochastic_sampling.
SchedulerConfig read_scheduler_config(const ConfigFile& file);

struct Schedule {
  std::vector<float> sigmas;     // steps + 1; the last is where the last step ends
  std::vector<float> timesteps;  // steps
};

// steps ≥ 1; image_tokens: packed tokens of the picture, which decide the shift when it is dynamic.
Schedule make_schedule(const SchedulerConfig& config, int steps, std::int64_t image_tokens);

}  // namespace ditfleet::pipeline
