// Routing policies by name: the service's own (`finish`) and the baselines it is compared with.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/scheduling/placement/routing_policy.h"
#include "coordinator/simulation/simulation.h"
#include "shared/core/result.h"

namespace ditfleet::simulation {

struct PolicyOptions {
  std::string name = "finish";
  std::map<std::string, double> tunables = {};  // tunables left out keep their defaults
};

struct Tunable {
  std::string_view name;
  double value = 0;               // default
  std::vector<double> grid = {};  // values that tuning tries; `finish` has none: the service has no trace to tune on
  double least = 0, most = 1000;  // inclusive
};

// kInvalidArgument: unknown policy or tunable, or a value out of range. The message lists what exists.
Result<std::unique_ptr<scheduling::RoutingPolicy>> make_policy(const PolicyOptions& options);
std::vector<std::string_view> policy_names();

struct PolicyReport : Report {
  std::string policy;  // with the tunables that were given
};
// As simulate(), with another policy than `options` has. Errors: also those of make_policy().
Result<PolicyReport> simulate(const Trace& trace, const CostTable& costs, SimulationOptions options,
                              const PolicyOptions& policy);
// Tries the grid of each tunable that `policy` does not set, one tunable at a time. Returns the report with the lowest
// p95. A policy without a grid keeps its defaults.
Result<PolicyReport> simulate_tuned(const Trace& trace, const CostTable& costs, const SimulationOptions& options,
                                    const PolicyOptions& policy);

}  // namespace ditfleet::simulation
