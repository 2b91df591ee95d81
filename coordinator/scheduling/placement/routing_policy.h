// Chooses the worker for a unit. The service uses EarliestFinishPolicy; the simulator runs other policies in the same
// scheduler (coordinator/simulation).
//
// Not thread-safe. Times are microseconds of Redis' clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "coordinator/scheduling/placement/cost_model.h"
#include "coordinator/scheduling/placement/fleet.h"

namespace ditfleet::scheduling {

struct RouteRequest {
  ClassId cls = 0;
  ModelId model = 0;
  std::uint64_t lane_hash = 0;  // of the class and the adapters, for rendezvous hashing
  std::int64_t prior_us = 0;
  std::int64_t lane_work_us = 0;  // sum of the priors of all units in the lane, this one included
  bool may_wait = true;           // false: do not return kWait
  std::span<const AdapterId> adapters = {};
  std::int64_t waited_us = 0;             // since the unit became ready
  bool exclusive = false;                 // only on a ready worker that holds no unit
  std::vector<std::string> avoided = {};  // names of workers that do not get the unit
  std::int64_t pixels = 0;                // the worker must be able to hold; 0: any can

  bool allows(const Fleet& fleet, WorkerId w) const {
    const auto& worker = fleet.at(w);
    if (exclusive && (worker.state != WorkerState::kReady || !worker.held.empty())) return false;
    return std::find(avoided.begin(), avoided.end(), worker.name) == avoided.end();
  }
};

struct Route {
  // kWait: a worker has capacity, but a full one is worth waiting for.
  // kNoCapacity: every worker that could take the unit is full. kNoWorker: no ready worker could take it.
  enum class Kind { kAssign, kWait, kNoCapacity, kNoWorker };
  Kind kind = Kind::kNoWorker;
  WorkerId worker = 0;
  bool cold = false;
  std::int64_t missing_us = 0;  // loads, swaps and cold class on the best worker that has capacity
  std::int64_t run_us = 0, cold_us = 0;
  std::int64_t load_us = 0;  // of the model
  AdapterNeed need;
  std::string reason;  // with the numbers, for the `assigned` event; kAssign only
};

class RoutingPolicy {
 public:
  virtual ~RoutingPolicy() = default;
  virtual Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request,
                       std::int64_t now_us) = 0;
  // Orders a tenant's units of equal priority and deadline. Returns how long after it became ready a unit with this
  // predicted run is due. The unit that is due first goes first. 0: order of arrival.
  virtual std::int64_t due_after_us(std::int64_t /*run_us*/) const { return 0; }
  // Added to the predicted finish on a worker with this need when the scheduler considers moving a held unit there.
  virtual std::int64_t penalty_us(const AdapterNeed&) const { return 0; }
  // Which adapters a worker evicts to make room.
  virtual Eviction eviction() const { return Eviction::kLeastRecentlyUsed; }
};

}  // namespace ditfleet::scheduling
