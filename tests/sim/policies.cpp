#include "tests/sim/policies.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "coordinator/scheduling/placement/earliest_finish_policy.h"
#include "tests/sim/baseline_policies.h"

namespace ditfleet::simulation {
namespace {

using scheduling::EarliestFinishPolicy;
using scheduling::RoutingPolicy;

struct Row {
  std::string_view name;
  std::vector<Tunable> tunables;  // in the order in which `make` takes their values
  std::function<std::unique_ptr<RoutingPolicy>(const std::vector<double>&)> make;
};

const std::vector<Row>& table() {
  static const std::vector<Row> rows = {
      {"finish",
       {{"load_weight", EarliestFinishPolicy::Options{}.load_weight},
        {"due_runs", EarliestFinishPolicy::Options{}.due_runs}},
       [](const std::vector<double>& v) {
         return std::make_unique<EarliestFinishPolicy>(
             EarliestFinishPolicy::Options{.load_weight = v[0], .due_runs = v[1]});
       }},
      {"llm_d_ladder",
       {{"affinity_weight", 1.0, {0.1, 0.25, 0.5, 1.0, 2.0, 4.0}}},
       [](const std::vector<double>& v) { return llm_d_ladder(v[0]); }},
      {"ray_multiplex",
       {{"matching_timeout_ms", 1000.0, {0.0, 50.0, 250.0, 1000.0, 4000.0}, 0, 1e7}},
       [](const std::vector<double>& v) { return ray_multiplex(v[0]); }},
      {"bounded_rendezvous",
       {{"bound", 1.25, {1.1, 1.25, 1.5, 2.0, 4.0}, 1}},
       [](const std::vector<double>& v) { return bounded_rendezvous(v[0]); }},
      {"round_robin", {}, [](const std::vector<double>&) { return round_robin(); }},
      {"least_loaded", {}, [](const std::vector<double>&) { return least_loaded(); }},
  };
  return rows;
}

template <class Rows>
std::string names_of(const Rows& rows) {
  std::string out;
  for (const auto& row : rows) out += (out.empty() ? "" : ", ") + std::string(row.name);
  return out;
}

}  // namespace

Result<std::unique_ptr<RoutingPolicy>> make_policy(const PolicyOptions& options) {
  const auto& rows = table();
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.name == options.name; });
  if (row == rows.end())
    return invalid_argument("no routing policy '" + options.name + "'; the policies are " + names_of(rows));
  std::vector<double> values;
  for (const auto& tunable : row->tunables) values.push_back(tunable.value);
  for (const auto& [name, value] : options.tunables) {
    const auto it = std::find_if(row->tunables.begin(), row->tunables.end(),
                                 [&name = name](const Tunable& t) { return t.name == name; });
    if (it == row->tunables.end()) {
      return invalid_argument("the routing policy '" + options.name + "' has no tunable '" + name + "'" +
                              (row->tunables.empty() ? "; it has none" : "; it has " + names_of(row->tunables)));
    }
    if (!(value >= it->least && value <= it->most)) {
      return invalid_argument(fmt::format("the routing policy '{}' has {}={}; it must be a number from {} to {}",
                                          options.name, name, value, it->least, it->most));
    }
    values[static_cast<std::size_t>(it - row->tunables.begin())] = value;
  }
  return row->make(values);
}

std::vector<std::string_view> policy_names() {
  std::vector<std::string_view> out;
  for (const auto& row : table()) out.push_back(row.name);
  return out;
}

Result<PolicyReport> simulate(const Trace& trace, const CostTable& costs, SimulationOptions options,
                              const PolicyOptions& policy) {
  if (auto made = make_policy(policy); !made) return made.error();
  options.policy = [&policy] { return std::move(*make_policy(policy)); };
  auto report = simulate(trace, costs, options);
  if (!report) return report.error();
  PolicyReport named{std::move(*report), policy.name};
  for (const auto& [name, value] : policy.tunables) named.policy += fmt::format(",{}={}", name, value);
  return named;
}

Result<PolicyReport> simulate_tuned(const Trace& trace, const CostTable& costs, const SimulationOptions& options,
                                    const PolicyOptions& policy) {
  std::vector<PolicyOptions> tries;
  for (const auto& row : table()) {
    for (const auto& tunable : row.tunables) {
      if (row.name != policy.name || policy.tunables.contains(std::string(tunable.name))) continue;
      for (const double value : tunable.grid) {
        tries.push_back(policy);
        tries.back().tunables[std::string(tunable.name)] = value;
      }
    }
  }
  if (tries.empty()) tries.push_back(policy);
  auto best = simulate(trace, costs, options, tries.front());
  for (std::size_t i = 1; i < tries.size() && best; ++i) {
    auto report = simulate(trace, costs, options, tries[i]);
    if (!report || report->figure("latency_p95") < best->figure("latency_p95")) best = std::move(report);
  }
  return best;
}

}  // namespace ditfleet::simulation
