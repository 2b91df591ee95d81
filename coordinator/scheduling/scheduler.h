// The scheduler of one shard as a state machine: events go in, actions come out. It uses no Redis, clock or thread;
// SchedulerService performs its actions.
//
// Redis' feed is authoritative: a unit is ready, started or ended when its event arrives, not when an action was
// requested. Redis checks every transition, so a wrong action does no harm. If Redis rejects an action, the scheduler
// requests an audit, which compares its state with the stored state.
//
// Not thread-safe. `now_us` is Redis' clock in microseconds and never decreases.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "coordinator/scheduling/admission.h"
#include "coordinator/scheduling/order/fair_queue.h"
#include "coordinator/scheduling/placement/cost_model.h"
#include "coordinator/scheduling/placement/fleet.h"
#include "coordinator/scheduling/placement/routing_policy.h"
#include "shared/job/catalogue.h"
#include "shared/queue/types.h"

namespace ditfleet::scheduling {

// For metrics. The strings are valid during the call.
class SchedulerObserver {
 public:
  virtual ~SchedulerObserver() = default;
  virtual void assigned(const std::string& tenant, bool cold, std::int64_t queue_wait_us) = 0;
  // A unit succeeded. `predicted_us` is 0 if no observed run supports the prediction.
  virtual void ran(const std::string& tenant, const std::string& class_key, std::int64_t predicted_us,
                   std::int64_t run_us) = 0;
};

struct SchedulerOptions {
  job::Catalogue catalogue;
  std::string precision = "auto";         // of shape classes
  std::map<std::string, double> weights;  // of tenants; the default is 1
  int lookahead = 2;                      // units a worker holds, including the running one
  std::int64_t age_bound_ms = 60'000;
  std::int64_t silent_after_ms = 3'500;    // without a heartbeat
  bool refuse_too_large = true;            // reject jobs that no registered worker has the memory for
  std::function<std::string()> new_nonce;  // required; the service draws 128 random bits
  TenantAdapters adapters;                 // unset: jobs with adapters are rejected
  std::shared_ptr<RoutingPolicy> routing;  // used by this scheduler only; null: EarliestFinishPolicy
  SchedulerObserver* observer = nullptr;   // must outlive the scheduler
};

struct Actions {
  struct Assignment {
    std::string owner;
    std::vector<queue::AssignRequest> units;
  };
  std::vector<queue::Admission> admit;
  std::vector<queue::Rejection> reject;
  std::vector<Assignment> assign;
  std::vector<queue::Attempt> revoke;
  std::vector<queue::Attempt> lost;  // to revoke because the worker is lost: counts as a lapse of the lease
  bool empty() const { return admit.empty() && reject.empty() && assign.empty() && revoke.empty() && lost.empty(); }
};

struct QueueStats {
  std::size_t jobs = 0, ready = 0, held = 0, delayed = 0;
  std::size_t unplaceable = 0;  // ready, but no registered worker has the model, enough adapter slots and memory
  std::map<WorkerState, std::size_t> workers;
  std::int64_t oldest_ready_us = 0;  // since when the longest waiting of the ready units is ready; 0: there are none
  std::map<std::string, WorkerState> unwell;  // by name: silent, stuck, overdue or probing workers
};

class Scheduler {
 public:
  explicit Scheduler(SchedulerOptions options);
  ~Scheduler();

  // --- inputs ------------------------------------------------------------------------------------
  // Starts from the stored state. Call it once, on a new object. Silent workers keep their units for `grace_ms`,
  // because their heartbeats could not arrive while Redis or the coordinator was down.
  void rebuild(std::span<const queue::UnitView> open, const std::map<std::string, std::int64_t>& virtual_times,
               const std::vector<queue::WorkerInfo>& workers, std::int64_t grace_ms, std::int64_t now_us);
  // The same grace, after Redis was unreachable.
  void grant_grace(std::int64_t grace_ms, std::int64_t now_us) { grace_until_us_ = now_us + grace_ms * 1000; }
  // While Redis' clock is doubtful, no job is late.
  void hold_deadlines(bool hold) { deadlines_held_ = hold; }
  // Call it before the open units are read: jobs that end from then on stay ended in the next audit().
  void begin_audit();
  // Corrects the state to match `open`, which was requested at `asked_us`. Skips units that changed since then.
  void audit(std::span<const queue::UnitView> open, std::int64_t asked_us, std::int64_t now_us);
  void on_intake(std::span<const queue::IntakeEntry> entries, std::int64_t now_us);
  void on_event(const queue::Event& event, std::int64_t now_us);
  // The registry. Call it at least every second: it also detects silent workers.
  void on_workers(const std::vector<queue::WorkerInfo>& workers, std::int64_t now_us);
  // Redis rejected the assignment, because the unit was not ready.
  void on_assign_refused(const queue::UnitRef& ref, const std::string& nonce, std::int64_t now_us);

  // --- outputs -----------------------------------------------------------------------------------
  // The actions to perform now. Assigned units then count as held.
  Actions decide(std::int64_t now_us);
  // True: the state may differ from the stored one; read the open units and call audit().
  bool wants_audit() const { return wants_audit_; }
  std::size_t ready() const { return queue_.size(); }

  // For setting sizes and pins, which workers do not report.
  Residency& adapters() { return fleet_.adapters(); }

  Estimate estimate(const job::JobSpec& complete_spec, const std::string& tenant, std::int64_t now_us) const;
  std::map<std::string, std::int64_t> virtual_times() const {
    return queue_.tenants().times();
  }  // of tenants with waiting units
  const Tenants& tenants() const { return queue_.tenants(); }
  // The class and model of a job that has not ended; nothing of another job.
  std::optional<std::pair<std::string, std::string>> class_of(const std::string& job) const;
  std::string first_adapter_of(const std::string& job) const;  // its digest; empty: none, or the job is unknown
  const Fleet& fleet() const { return fleet_; }
  QueueStats stats() const;
  // Models that the catalogue does not have count as "other". `unread`: jobs in the intake that on_intake() has not
  // received; each counts as a job with the defaults of the default model.
  queue::FleetForecast forecast(std::size_t unread, std::int64_t now_us) const;
  // FleetForecast::ends_ms.
  std::map<std::string, std::int64_t> ends_ms() const;
  // Of the jobs that workers hold and of the first `most` queued units.
  std::map<std::string, queue::JobOutlook> outlook(std::size_t most, std::int64_t now_us) const;
  std::size_t pending_jobs() const;  // received from the intake, but not known to be admitted
  // What a unit that has not started waits for, as a phrase. Empty: it does not wait, or it is unknown.
  std::string waits_for(const queue::UnitRef& ref, std::int64_t now_us) const;

 private:
  struct Unit {
    // kPending: not admitted yet. kQueued: in the fair queue. kAlone: ready, but a worker was lost with it, so that it
    // runs with no other unit on its worker. kParked: ready, but waits for a worker with more memory. kUnknown: until
    // the next event or audit.
    enum class Where { kPending, kQueued, kAlone, kParked, kDelayed, kHeld, kUnknown, kEnded };
    Where where = Where::kPending;
    std::int64_t charged_us = 0;  // in advance, not settled yet
    bool guess = false;           // the charge is not based on observed runs
    FairQueue::Handle handle = 0;
    std::optional<LaneId> lane;  // its own, if it avoids workers; else its job's
    int lapses = 0;              // how often a worker was lost with it
    std::vector<std::string> failed_on;
    WorkerId worker = 0;
    std::string nonce;
    std::int64_t ready_us = 0;
    std::int64_t touched_us = 0;
    std::int64_t revoked_us = 0;  // when a revoke was last requested
  };
  struct Job {
    std::string id;
    TenantId tenant = 0;
    ModelId model = 0;
    ClassId cls = 0;
    LaneId lane = 0;
    std::int64_t prior_us = 0, cost_us = 0, deadline_us = 0;
    int priority = 0;
    std::uint64_t arrival = 0;
    std::size_t open = 0;
    std::vector<Unit> units;
  };
  struct Class {
    std::string key;
    std::uint64_t hash = 0;
    ModelId model = 0;
    std::int64_t pixels = 0;
    std::size_t open = 0;  // units of the class
  };
  struct Lane {
    ClassId cls = 0;
    std::vector<AdapterId> adapters;
    std::vector<std::string> failed_on;  // names of workers that its units avoid
    std::uint64_t hash = 0;              // of class and adapters
    std::size_t open = 0;                // jobs and units in the lane
    // The last rounds of decide() in which the lane was skipped and closed (FairQueue::Round).
    std::uint64_t skipped_round = 0, closed_round = 0;
    std::int64_t missing_us = 0;  // when it was skipped
  };

  ModelId intern_model(const std::string& name);
  // The most adapter slots of any worker of the model so far. 0: unknown.
  int most_slots_seen(const std::string& model) const;
  std::optional<Error> unmet_memory(const Classified& job) const;
  // The pixels that a worker must be able to hold to get a unit of the class. 0: any worker gets it, because no
  // registered worker can hold it; the worker's error then has the numbers.
  std::int64_t needed_pixels(ClassId c) const;
  // No open worker can hold it.
  bool is_too_large(ClassId c) const { return needed_pixels(c) > fleet_.most_open_pixels(classes_[c].model); }
  bool must_park(const Job& job) const { return needed_pixels(job.cls) > fleet_.most_pixels(job.model); }
  // Parks and unparks units after the memory of the fleet has changed.
  void repark(std::int64_t now_us);
  std::vector<WorkerId> update_fleet(const std::vector<queue::WorkerInfo>& workers, std::int64_t now_us);
  ClassId intern_class(const std::string& key, const std::string& model);
  std::int64_t tokens_of(const job::ShapeClass& shape) const;
  // enter_lane() counts one more user of the lane, leave_lane() one less.
  LaneId enter_lane(ClassId cls, std::vector<AdapterId> adapters, std::vector<std::string> failed_on);
  void leave_lane(LaneId id);
  static bool is_waiting(const Unit& unit) {
    return unit.where == Unit::Where::kQueued || unit.where == Unit::Where::kAlone ||
           unit.where == Unit::Where::kParked;
  }
  static LaneId lane_of(const Job& job, const Unit& unit) { return unit.lane.value_or(job.lane); }
  void forget_job(const Job& job);
  Job& add_job(const std::string& id, const std::string& tenant, const std::string& model, const std::string& class_key,
               const std::vector<std::string>& adapters, int units, std::int64_t now_us);
  Job* find_job(const std::string& id) const;
  Unit* find_unit(const queue::UnitRef& ref, Job** job);
  Job& job_of(const queue::UnitView& view, std::int64_t now_us);

  // What earlier attempts left behind. Call it before unit_ready() and unit_held().
  void set_past(Job& job, int unit, int lapses, std::vector<std::string> failed_on, std::int64_t now_us);
  void unit_ready(Job& job, int unit, std::int64_t ready_us, std::int64_t now_us);
  void unit_held(Job& job, int unit, const std::string& owner, const std::string& nonce, std::int64_t now_us);
  void unit_delayed(Job& job, int unit, std::int64_t now_us);
  void unit_ended(Job& job, int unit, std::int64_t now_us);
  // Ends the job's units that are in `where`; empty: all of them.
  void end_units(Job& job, std::optional<Unit::Where> where, std::int64_t now_us);
  // Records that the route's worker holds the unit. Returns the adapters that it evicts for the unit.
  Residency::Dropped hold(Job& job, int unit, const Route& route, std::string nonce, std::int64_t now_us);
  void leave(Job& job, Unit& unit, int index, std::int64_t now_us);
  // The predicted run of a unit that a worker holds, by what is known now.
  std::int64_t held_run_us(const HeldUnit& held, WorkerId w) const;
  std::pair<std::int64_t, bool> prediction(const Job& job, bool cold) const;
  // Charges the prediction in advance, including the cost of a cold class.
  void charge(const Job& job, Unit& unit, bool cold);
  // Replaces the charge made in advance by `actual_us`. A negative `actual_us` stands for the prediction if the unit
  // has started, else for 0.
  void settle(const Job& job, Unit& unit, int index, std::int64_t actual_us);
  void recharge(ModelId model);
  void apply_view(const queue::UnitView& view, std::int64_t now_us);
  void note_outcome(const Unit& unit, job::State state, std::int64_t now_us);
  void learn(const Job& job, Unit& unit, int index, const queue::Event& event);
  void on_unit_event(Job& job, const queue::Event& event, int unit, std::int64_t now_us);

  void assign_ready(Actions& actions, std::int64_t now_us);
  using Batches = std::unordered_map<WorkerId, std::size_t>;  // index in Actions::assign
  void place(FairQueue::Candidate candidate, std::int64_t now_us, Batches& batches, Actions& actions);
  void place_alone(std::int64_t now_us, Batches& batches, Actions& actions);
  std::vector<std::string> avoided(const Job& job, const Unit& unit, std::int64_t now_us) const;
  void assign(Job& job, int index, const Route& route, std::int64_t now_us, Batches& batches, Actions& actions);
  std::string queued_waits_for(const Job& job, const Unit& unit, std::int64_t now_us) const;
  std::string held_waits_for(const Unit& unit, const queue::UnitRef& ref, std::int64_t now_us) const;
  void revoke_from_absent(std::int64_t now_us);
  void revoke_for_idle(std::int64_t now_us);
  void request_revoke(const HeldUnit& held, bool lost, std::int64_t now_us);

  SchedulerOptions options_;
  FairQueue queue_;
  Fleet fleet_;
  CostModel costs_;
  std::vector<int> slots_seen_;  // by model
  std::unordered_map<std::string, std::unique_ptr<Job>> jobs_;
  std::vector<std::pair<Job*, int>> queued_;  // by FairQueue handle
  std::vector<std::string> models_;
  std::unordered_map<std::string, ModelId> model_ids_;
  std::vector<Class> classes_;
  std::vector<ClassId> free_classes_;
  std::unordered_map<std::string, ClassId> class_ids_;
  std::vector<Lane> lanes_;
  std::vector<LaneId> free_lanes_;
  std::map<std::tuple<ClassId, std::vector<AdapterId>, std::vector<std::string>>, LaneId> lane_ids_;
  std::set<std::pair<Job*, int>> alone_;   // units in Where::kAlone
  std::set<std::pair<Job*, int>> parked_;  // units in Where::kParked
  std::vector<std::int64_t> most_pixels_;  // of the fleet, by model, when repark() last ran
  Actions pending_;
  std::size_t pending_bytes_ = 0;  // of the specs in pending_.admit
  std::uint64_t arrivals_ = 0, round_ = 0;
  int skips_ = 0;                // in this round
  bool met_too_large_ = false;   // a unit in this round; until then no lane is checked
  std::int64_t largest_us_ = 0;  // recent charge
  bool is_late(const Job& job, std::int64_t now_us) const {
    return !deadlines_held_ && job.deadline_us > 0 && job.deadline_us <= now_us;
  }

  bool deadlines_held_ = false;
  std::int64_t grace_until_us_ = 0;
  bool wants_audit_ = false;
  std::optional<std::unordered_set<std::string>> ended_since_;  // jobs, while an audit is under way
};

}  // namespace ditfleet::scheduling
