// The schedulers of video pipelines, as diffusers computes them when the pipeline passes only the number of steps:
// UniPC with flow sigmas, and flow-match Euler with a static shift.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "pipeline/sampling/sampler.h"
#include "pipeline/sampling/schedule.h"

namespace ditfleet::pipeline {

struct FlowSchedulerConfig {
  bool unipc = true;      // UniPCMultistepScheduler; else FlowMatchEulerDiscreteScheduler
  double flow_shift = 1;  // of UniPC
  int solver_order = 2;   // of UniPC: 1 or 2
  bool lower_order_final = true;
  SchedulerConfig euler = {};
};

// Throws Failure (kDataCorrupt) for another class and for options that are not supported; the message contains file,
// field and what would be right.
FlowSchedulerConfig read_flow_scheduler_config(const ConfigFile& file);

// Precondition: steps ≥ 1. UniPC's timesteps are whole numbers. `sigmas`: as make_schedule(), for Euler only.
Schedule make_flow_schedule(const FlowSchedulerConfig& config, int steps, const std::vector<double>& sigmas = {});

// The field flow_shift. Throws Failure (kInvalidArgument) unless it is above 0.
double checked_flow_shift(double shift);

// The sampler of one video, with sigmas on the device.
std::unique_ptr<Sampler> make_flow_sampler(const FlowSchedulerConfig& config, const Schedule& schedule,
                                           c10::Device device);

}  // namespace ditfleet::pipeline
