// The smallest fleet that meets latency objectives on a trace, by simulating fleets of several sizes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "coordinator/simulation/cost_table.h"
#include "coordinator/simulation/trace.h"
#include "shared/core/result.h"

namespace ditfleet::simulation {

// A bound on a percentile of the latency, from arrival to end, of all jobs of the trace.
struct Objective {
  int percent = 95;  // 50, 95 or 99
  double seconds = 0;
};
// "p95=20s": p50, p95 or p99, and a time in ms, s or m. kInvalidArgument: another text.
Result<Objective> parse_objective(const std::string& text);

struct FleetFigures {
  int workers = 0;
  double p50_s = 0, p95_s = 0, p99_s = 0;
  double utilisation = 0;  // share of the time from the first arrival to the last end in which a worker runs
  double gpu_hours = 0;    // of all workers in that time
  bool meets = false;
};

struct Capacity {
  FleetFigures fleet;                     // the smallest that meets the objectives, else the largest that was tried
  std::optional<FleetFigures> one_fewer;  // the fleet with one worker fewer, if it has workers
  double load = 0;                        // arrivals may come faster by this factor, up to kMostLoad
};
inline constexpr double kMostLoad = 4;

// Costs for traces in which every run time is observed: loads and swaps of adapters take no time beyond the run.
CostTable observed_costs(int lookahead);

// All jobs count; workers start without classes and adapters. Assumes that latencies fall with the number of workers,
// but the next larger fleet meets the objectives too. `speed`: SimulationOptions. Takes some 20 simulations.
// kInvalidArgument: no objective, no worker, or an error of simulate().
Result<Capacity> find_capacity(const Trace& trace, const CostTable& costs, const std::vector<Objective>& objectives,
                               double speed, int max_workers);

}  // namespace ditfleet::simulation
