// The noise levels of a request, equal to those of diffusers' FlowMatchEulerDiscreteScheduler, including its float32
// rounding. Does not use LibTorch.
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

// Throws Failure (kDataCorrupt); the message contains file and field. Also throws it for unsupported
// features of diffusers: other scheduler classes and stochastic_sampling.
SchedulerConfig read_scheduler_config(const ConfigFile& file);

struct Schedule {
  std::vector<float> sigmas;     // steps + 1; the last step ends at the last sigma
  std::vector<float> timesteps;  // steps
};

// Precondition: steps ≥ 1. `image_tokens`: the number of packed tokens of the image; determines a dynamic shift.
// `sigmas`: those of the steps before the shift, without the last one, as diffusers' set_timesteps(sigmas=); empty: the
// scheduler's own. `mu`: of a dynamic shift, instead of the one that image_tokens gives.
Schedule make_schedule(const SchedulerConfig& config, int steps, std::int64_t image_tokens,
                       const std::vector<double>& sigmas = {}, std::optional<double> mu = {});

}  // namespace ditfleet::pipeline
