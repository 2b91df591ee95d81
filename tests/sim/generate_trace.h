// Makes traces for the fleet simulator.
#pragma once

#include <cstdint>
#include <vector>

#include "coordinator/simulation/cost_table.h"
#include "coordinator/simulation/trace.h"
#include "shared/core/result.h"

namespace ditfleet::simulation {

// Poisson arrivals at `load` times the capacity of the workers, which is computed for warm workers with all adapters in
// slots. For a fifth of the time the rate is `burst` times the mean, else lower, so that the mean holds. Adapters and
// shapes follow Zipf's law, with 1024² as the most frequent shape. Tenants have shares of 4 : 2 : 1 : ….
struct TraceOptions {
  int jobs = 5000, workers = 16, adapters = 200, shapes = 12, tenants = 3;
  double zipf = 0.9, load = 0.8, burst = 1.5;
  double without_adapter = 0.1;     // share of the jobs
  std::vector<int> steps = {4};     // drawn uniformly
  double slo_factor = 3.0;          // objective: this times the best run,
  std::int64_t slo_slack_ms = 500;  // plus this
  std::uint64_t seed = 1;
};
// kInvalidArgument: an option is out of range.
Result<Trace> generate_trace(const TraceOptions& options, const CostTable& costs);

}  // namespace ditfleet::simulation
