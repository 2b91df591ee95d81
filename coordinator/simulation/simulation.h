// Serves a trace with the service's own scheduler (coordinator/scheduling), simulated workers and a virtual clock. The
// scheduler receives arrivals, heartbeats, starts and ends as Redis would send them.
// Equal traces, costs and options give equal figures, except for how long decisions take.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/scheduling/placement/routing_policy.h"
#include "coordinator/simulation/cost_table.h"
#include "coordinator/simulation/trace.h"
#include "shared/core/result.h"

namespace ditfleet::simulation {

struct SimulationOptions {
  std::function<std::unique_ptr<scheduling::RoutingPolicy>()> policy = {};  // unset: the service's own
  int workers = 0;                                                          // 0: the number in the trace
  double warm_up = 0.2;    // this share of the jobs, from the first, is excluded from figures
  std::uint64_t seed = 1;  // of the variation of runs
  double speed = 1;        // of the workers: runs take their time divided by it
};

struct Figure {
  std::string metric;
  double value = 0;
  std::string unit;
};

struct Report {
  std::vector<Figure> figures;
  double figure(const std::string& metric) const;  // NaN if there is no such figure
};

// Runs for seconds with large traces. No side effects.
// kInvalidArgument: number of workers unknown, no jobs, or a job that the scheduler rejects.
Result<Report> simulate(const Trace& trace, const CostTable& costs, const SimulationOptions& options);

}  // namespace ditfleet::simulation
