// A trace served by the scheduler of the service (coordinator/scheduling), as it is, on a virtual clock: it is told
// of arrivals, heartbeats, starts and ends as Redis would tell it, and what it decides happens to pretended workers.
// The same trace, costs and options give the same figures, but for how long decisions took.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/scheduling/placement/routing_policy.h"
#include "coordinator/simulation/cost_table.h"
#include "coordinator/simulation/trace.h"
#include "shared/core/result.h"

namespace ditfleet::simulation {

struct SimulationOptions {
  scheduling::PolicyOptions policy;
  int workers = 0;         // 0: as many as the trace is meant for
  double warm_up = 0.2;    // the part of the jobs, from the first, that no figure counts
  std::uint64_t seed = 1;  // of how runs vary
};

// One figure of a report: metric, value and unit, as in tests/bench/results.
struct Figure {
  std::string metric;
  double value = 0;
  std::string unit;
};

// What became of one job. Times are of the trace's clock. Where it was taken back and assigned anew they are of the
// last assignment, and `host_misses` are the loads of all.
struct ServedJob {
  std::size_t worker = 0;
  // It runs from `started_us`, when its adapter is in a slot, which the worker has waited for since `began_us`.
  std::int64_t assigned_us = 0, began_us = 0, started_us = 0, ended_us = 0;
  int host_misses = 0;
  bool slot_miss = false, cold_class = false;
};

struct Report {
  std::string policy;  // with its tunables
  std::vector<Figure> figures;
  std::vector<ServedJob> jobs;                     // in the order of the trace
  double figure(const std::string& metric) const;  // not a number if there is none
};

// kInvalidArgument: no such policy or tunable, no number of workers, no jobs, one that the scheduler rejects. Takes a
// while; has no side effects.
Result<Report> simulate(const Trace& trace, const CostTable& costs, const SimulationOptions& options);

// With every combination of the policy's grid (routing_policy.h), but for tunables that `options` gives: the report of
// the lowest p95.
Result<Report> simulate_tuned(const Trace& trace, const CostTable& costs, const SimulationOptions& options);

}  // namespace ditfleet::simulation
