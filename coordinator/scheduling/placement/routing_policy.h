// How a unit finds its worker: one interface, so that the router can be compared with what others do, in the very
// scheduler (coordinator/simulation). `finish` is the router of the service; the rest are baselines.
//
// Not thread safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/scheduling/placement/cost_model.h"
#include "coordinator/scheduling/placement/fleet.h"
#include "shared/core/result.h"

namespace ditfleet::scheduling {

struct RouteRequest {
  ClassId cls = 0;
  ModelId model = 0;
  std::uint64_t class_hash = 0;  // of the class and the adapters: what keeps coming back to one worker
  std::int64_t prior_us = 0;
  std::int64_t lane_work_us = 0;  // priors of all that waits in the lane, this unit included
  bool may_wait = true;           // for a worker without a slot; false for aged units: they take whoever has one
  std::span<const AdapterId> adapters = {};
  std::int64_t waited_us = 0;  // since the unit became ready
  std::int64_t tail_us = 0;    // from ready to end: what one unit in twenty exceeds of late; 0: not known
};

struct Route {
  // kWait: there is a place, and a better one is worth waiting for. kNoPlace: whoever could take it has none now.
  enum class Kind { kAssign, kWait, kNoPlace, kNoWorker };
  Kind kind = Kind::kNoWorker;
  WorkerId worker = 0;
  bool cold = false;
  std::int64_t lacks_us = 0;  // kWait: load, swap and cold class on the best worker with a slot
  std::int64_t wait_us = 0, run_us = 0, cold_us = 0;
  AdapterNeed need;
  std::string reason;  // with the numbers, for the `assigned` event; only of kAssign
};

// RoutingPolicy::patience_us of those that have a patience, in runs: one tail at most.
inline std::int64_t patience_of(double runs, std::int64_t run_us, std::int64_t tail_us) {
  return std::min(static_cast<std::int64_t>(runs * static_cast<double>(run_us)), tail_us);
}

class RoutingPolicy {
 public:
  virtual ~RoutingPolicy() = default;
  virtual std::string_view name() const = 0;
  virtual Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request,
                       std::int64_t now_us) = 0;
  // The order of a tenant's units of one priority and deadline, for a unit that runs so long, where one in twenty has
  // taken more than `tail_us` of late. It is due so long after it became ready, and what is due first goes first; 0:
  // the order of arrival.
  virtual std::int64_t patience_us(std::int64_t /*run_us*/, std::int64_t /*tail_us*/) const { return 0; }
  // Where it would have to load, one behind it that has not to may pass it if it is due no later than so much after it.
  // `late_us`: how long ago it was due.
  virtual std::int64_t reach_us(std::int64_t /*run_us*/, std::int64_t /*late_us*/, std::int64_t /*tail_us*/) const {
    return 0;
  }
  // When it comes up after such a wait, it is due so much later, once; 0: it goes.
  virtual std::int64_t yield_us(std::int64_t /*run_us*/, std::int64_t /*waited_us*/, std::int64_t /*tail_us*/) const {
    return 0;
  }
  // A round of decisions begins; lanes that are told to wait stay out of it until the next.
  virtual void begin_round() {}
  // What a worker that needs this is worse by than its finish says: also when a unit may move there.
  virtual std::int64_t bias_us(const AdapterNeed&) const { return 0; }
  // Which adapters a worker drops for want of room.
  virtual Eviction eviction() const { return Eviction::kLeastRecentlyUsed; }
};

struct PolicyOptions {
  std::string name = "finish";
  std::map<std::string, double> tunables = {};  // those left out have their defaults
};

// One tunable of a policy, with the values that a comparison tries.
struct Tunable {
  std::string_view name;
  double value = 0;               // by default
  std::vector<double> grid = {};  // empty: it keeps its value
  double least = 0, most = 1000;
};

// kInvalidArgument: no such policy, or it has no such tunable, or not with such a value; the message says what there
// is.
Result<std::unique_ptr<RoutingPolicy>> make_policy(const PolicyOptions& options);
std::vector<std::string_view> policy_names();
const std::vector<Tunable>& policy_tunables(std::string_view name);  // none for what is no policy

}  // namespace ditfleet::scheduling
