// The service's routing policy. A unit goes to the worker with the lowest
//
//   max(start, adapters in slots) + model load + cold-class cost + run + load_weight · adapter load.
//
// Candidates are ready workers with the model, enough memory for the unit's pixels, spare capacity and an adapter slot
// for each of the unit's adapters, except workers that the unit avoids. The last term is the cost of a load for other
// units: it evicts an adapter that some unit will load again. Ties go to the highest rendezvous hash of class, adapters
// and worker, so a unit returns to the worker that is warm.
//
// A unit may also wait for a full worker that is warm and holds its adapters. It waits if the full worker needs less
// preparation than the best candidate, and if all such workers together would finish the unit's lane before the best
// candidate finished this one unit. If the holders of an adapter cannot serve the demand, another worker therefore
// loads the adapter too.
//
// A tenant's units of equal priority and deadline go in the order of arrival plus `due_runs` predicted runs: a short
// unit overtakes a long one that arrived shortly before.
//
// No I/O, no clock. A decision examines the model's workers with capacity and the holders of the unit's adapters.
#pragma once

#include "coordinator/scheduling/placement/routing_policy.h"

namespace ditfleet::scheduling {

class EarliestFinishPolicy final : public RoutingPolicy {
 public:
  struct Options {
    double load_weight = 1.5;
    double due_runs = 1.0;
  };
  explicit EarliestFinishPolicy(Options options) : options_(options) {}
  Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) override;
  std::int64_t due_after_us(std::int64_t run_us) const override {
    return static_cast<std::int64_t>(options_.due_runs * static_cast<double>(run_us));
  }
  std::int64_t penalty_us(const AdapterNeed& need) const override {
    return static_cast<std::int64_t>(options_.load_weight * static_cast<double>(need.load_us));
  }
  Eviction eviction() const override { return Eviction::kLeastWorth; }

 private:
  Options options_;
};

}  // namespace ditfleet::scheduling
