// The jobs that have not ended, and where each of their units is. To move a unit is to put it into the fair queue, on a
// worker or aside, and to charge its tenant. Also numbers models, shape classes and lanes.
//
// No I/O, no clock; not thread-safe. Times are microseconds of Redis' clock.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "coordinator/scheduling/order/fair_queue.h"
#include "coordinator/scheduling/placement/cost_model.h"
#include "coordinator/scheduling/placement/fleet.h"
#include "coordinator/scheduling/placement/routing_policy.h"
#include "shared/job/catalogue.h"
#include "shared/queue/types.h"

namespace ditfleet::scheduling {

// kPending: not admitted yet. kQueued: in the fair queue. kAlone: ready, but a worker was lost with it, so that it runs
// with no other unit on its worker. kParked: ready, but waits for a worker with more memory. kUnknown: until the next
// event or audit.
enum class Where { kPending, kQueued, kAlone, kParked, kDelayed, kPaused, kHeld, kUnknown, kEnded };

struct Job {
  struct Unit {
    Job& job;
    int index;
    std::int64_t touched_us = 0;  // when an event or a decision last confirmed where it is
    std::uint64_t audit = 0;      // the latest one that had begun by then
    Where where = Where::kPending;
    std::int64_t charged_us = 0;  // in advance, not settled yet
    bool guess = false;           // the charge is not based on observed runs
    FairQueue::Handle handle = 0;
    std::optional<LaneId> own_lane = {};  // if it avoids workers; else it is in its job's
    int lapses = 0;                       // how often a worker was lost with it
    std::vector<std::string> failed_on = {};
    WorkerId worker = 0;
    std::string nonce = {};
    std::int64_t ready_us = 0;
    std::int64_t revoked_us = 0;  // when a revoke was last requested

    queue::UnitRef ref() const { return {job.id, index}; }
    LaneId lane() const { return own_lane.value_or(job.lane); }
    bool waits() const { return where == Where::kQueued || where == Where::kAlone || where == Where::kParked; }
  };
  std::string id;
  TenantId tenant = 0;
  ModelId model = 0;
  ClassId cls = 0;
  LaneId lane = 0;
  std::int64_t prior_us = 0, cost_us = 0, deadline_us = 0;
  int priority = 0;
  std::uint64_t arrival = 0;
  std::size_t open = 0;
  std::deque<Unit> units;
};
using Unit = Job::Unit;

class JobTable {
 public:
  static constexpr int kMaxUnits = 1024;  // of a stored job; the limit on requests is far lower

  struct Class {
    std::string key;
    std::uint64_t hash = 0;
    ModelId model = 0;
    std::int64_t pixels = 0;
    std::size_t open = 0;  // units of the class
  };
  struct Lane {
    ClassId cls = 0;
    std::vector<AdapterId> adapters = {};
    std::vector<std::string> failed_on = {};  // names of workers that its units avoid
    std::uint64_t hash = 0;                   // of class and adapters
    std::size_t open = 0;                     // jobs and units in the lane
    // The last rounds of decide() in which the lane was skipped and closed (FairQueue::Round).
    std::uint64_t skipped_round = 0, closed_round = 0;
    std::int64_t missing_us = 0;  // when it was skipped
  };

  // The arguments must outlive the table. Without `refuse_too_large`, units that no registered worker can hold park.
  JobTable(const job::Catalogue& catalogue, RoutingPolicy& routing, bool refuse_too_large, FairQueue& queue,
           Fleet& fleet, CostModel& costs)
      : catalogue_(catalogue),
        routing_(routing),
        refuse_too_large_(refuse_too_large),
        queue_(queue),
        fleet_(fleet),
        costs_(costs) {}

  ModelId intern_model(const std::string& name);
  std::optional<ModelId> find_model(const std::string& name) const;
  std::optional<ClassId> find_class(const std::string& key) const;
  const std::vector<std::string>& models() const { return models_; }
  const Class& class_at(ClassId c) const { return classes_[c]; }
  std::vector<Lane>& lanes() { return lanes_; }
  const std::vector<Lane>& lanes() const { return lanes_; }
  // A model that is no longer configured counts as one of images.
  std::int64_t tokens_of(const job::ShapeClass& shape) const;
  // The pixels that a worker must be able to hold to get a unit of the class. 0: any worker gets it, because no
  // registered worker can hold it; the worker's error then has the numbers.
  std::int64_t needed_pixels(ClassId c) const;
  // The worker has the memory and the adapter slots for a unit of the job.
  bool fits(const Job& job, WorkerId w) const;

  // A job without units. Precondition: its id is unknown.
  Job& add(const std::string& id, const std::string& tenant, const std::string& model, const std::string& class_key,
           const std::vector<std::string>& adapters, std::int64_t now_us);
  // Adds pending units until the job has `units`.
  void grow(Job& job, int units, std::int64_t now_us);
  const std::unordered_map<std::string, std::unique_ptr<Job>>& all() const { return jobs_; }
  Job* find_job(const std::string& id) const;        // nullptr: unknown, or all its units have ended
  Unit* find_unit(const queue::UnitRef& ref) const;  // nullptr: the same, or the job has no such unit
  Unit& queued(FairQueue::Handle h) const { return *queued_[h]; }
  const std::set<Unit*>& alone() const { return alone_; }  // units in Where::kAlone

  // Preconditions of what follows: the unit has not ended.
  // What earlier attempts left behind. Call it before ready() and found_held().
  void set_past(Unit& unit, int lapses, std::vector<std::string> failed_on, std::int64_t now_us);
  // To kQueued, kAlone or kParked.
  void ready(Unit& unit, std::int64_t ready_us, std::int64_t now_us);
  // To the route's worker. Charges its tenant. Returns the adapters that the worker evicts for the unit.
  Residency::Dropped hold(Unit& unit, const Route& route, std::string nonce, std::int64_t now_us);
  // An earlier leader, or this scheduler before a restart, has assigned the unit.
  void found_held(Unit& unit, const std::string& owner, const std::string& nonce, std::int64_t now_us);
  // To kDelayed, kPaused or kUnknown.
  void put_aside(Unit& unit, Where where, std::int64_t now_us);
  // The end of its last open unit erases the job.
  void end(Unit& unit, std::int64_t now_us);
  // The unit has not ended after all: Redis lost data. To kUnknown.
  void reopen(Unit& unit);
  // Ends the job's units that are in `where`; empty: all of them.
  void end_units(Job& job, std::optional<Where> where, std::int64_t now_us);
  // Parks and unparks units after the memory of the fleet has changed.
  void repark(std::int64_t now_us);

  // Replaces the charge made in advance.
  void settle(Unit& unit, std::int64_t actual_us);
  // Applies the current predictions to the charges made in advance, so that a wrong first guess does not last.
  void recharge(ModelId model);

  // An event or a decision has confirmed where the unit is.
  void touch(Unit& unit, std::int64_t now_us) const {
    unit.touched_us = now_us;
    unit.audit = audit_;
  }
  // Since the latest begin_audit(). Times would not tell: Redis' clock may be set back.
  bool touched(const Unit& unit) const { return unit.audit == audit_; }
  // take_ended() returns the jobs that have ended since the latest begin_audit(); nothing without that call.
  void begin_audit() {
    ++audit_;
    ended_.emplace();
  }
  std::optional<std::unordered_set<std::string>> take_ended() { return std::exchange(ended_, std::nullopt); }

 private:
  ClassId intern_class(const std::string& key, const std::string& model);
  // enter_lane() counts one more user of the lane, leave_lane() one less.
  LaneId enter_lane(ClassId cls, std::vector<AdapterId> adapters, std::vector<std::string> failed_on);
  void leave_lane(LaneId id);
  // The predicted cost of a unit, and whether it is a guess.
  std::pair<std::int64_t, bool> prediction(const Job& job, bool cold) const;
  void charge(Unit& unit, const std::pair<std::int64_t, bool>& prediction);

  const job::Catalogue& catalogue_;
  RoutingPolicy& routing_;
  const bool refuse_too_large_;
  FairQueue& queue_;
  Fleet& fleet_;
  CostModel& costs_;
  std::unordered_map<std::string, std::unique_ptr<Job>> jobs_;
  std::vector<Unit*> queued_;  // by FairQueue handle
  std::set<Unit*> alone_;
  std::vector<std::string> models_;
  std::unordered_map<std::string, ModelId> model_ids_;
  std::vector<Class> classes_;
  std::vector<ClassId> free_classes_;
  std::unordered_map<std::string, ClassId> class_ids_;
  std::vector<Lane> lanes_;
  std::vector<LaneId> free_lanes_;
  std::map<std::tuple<ClassId, std::vector<AdapterId>, std::vector<std::string>>, LaneId> lane_ids_;
  std::vector<std::int64_t> most_pixels_;  // of the fleet, by model, when repark() last ran
  std::uint64_t arrivals_ = 0;
  std::uint64_t audit_ = 0;
  std::optional<std::unordered_set<std::string>> ended_;
};

}  // namespace ditfleet::scheduling
