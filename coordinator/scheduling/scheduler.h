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
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "coordinator/scheduling/admission.h"
#include "coordinator/scheduling/job_table.h"
#include "coordinator/scheduling/placement/earliest_finish_policy.h"
#include "coordinator/scheduling/recovery.h"

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
  // A tenant's webhook, for jobs that name none; empty: none. Unset: none.
  std::function<std::string(const std::string& tenant)> webhook_url = {};
  // Not null. One with state is used by this scheduler only.
  std::shared_ptr<RoutingPolicy> routing = std::make_shared<EarliestFinishPolicy>(EarliestFinishPolicy::Options{});
  SchedulerObserver* observer = nullptr;  // must outlive the scheduler
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
  Scheduler(Scheduler&&) = delete;

  // --- inputs ------------------------------------------------------------------------------------
  // Starts from the stored state. Call it once, on a new object. Silent workers keep their units for `grace_ms`,
  // because their heartbeats could not arrive while Redis or the coordinator was down.
  void rebuild(std::span<const queue::UnitView> open, const std::map<std::string, std::int64_t>& virtual_times,
               const std::vector<queue::WorkerInfo>& workers, std::int64_t grace_ms, std::int64_t now_us);
  // The same grace, after Redis was unreachable.
  void grant_grace(std::int64_t grace_ms, std::int64_t now_us) { grace_until_us_ = now_us + grace_ms * 1000; }
  // While Redis' clock is doubtful, no job is late.
  void hold_deadlines(bool hold) { deadlines_held_ = hold; }
  // Call it before the open units are read: what changes from then on, the next audit() leaves alone.
  void begin_audit() {
    jobs_.begin_audit();
    recovery_.begin_audit();
  }
  // Corrects the state to match `open`.
  void audit(std::span<const queue::UnitView> open, std::int64_t now_us) { recovery_.audit(open, now_us); }
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
  bool wants_audit() const { return recovery_.wants_audit(); }
  std::size_t ready() const { return queue_.size(); }

  // For setting sizes and pins, which workers do not report.
  Residency& adapters() { return fleet_.adapters(); }

  Estimate estimate(const job::JobSpec& complete_spec, const std::string& tenant, std::int64_t now_us) const;
  // Of tenants with waiting units.
  std::map<std::string, std::int64_t> virtual_times() const { return queue_.tenants().times(); }
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
  // Why the fleet cannot run the job: it has too few adapter slots or too little memory.
  std::optional<Error> unmet_by_fleet(const Classified& job) const;
  // No open worker can hold it.
  bool is_too_large(ClassId c) const {
    return jobs_.needed_pixels(c) > fleet_.most_open_pixels(jobs_.class_at(c).model);
  }
  bool is_late(const Job& job, std::int64_t now_us) const {
    return !deadlines_held_ && job.deadline_us > 0 && job.deadline_us <= now_us;
  }
  std::vector<WorkerId> update_fleet(const std::vector<queue::WorkerInfo>& workers, std::int64_t now_us);
  void on_unit_event(Unit& unit, const queue::Event& event, std::int64_t now_us);
  void note_outcome(const Unit& unit, job::State state, std::int64_t now_us);
  void learn(Unit& unit, const queue::Event& event);
  // The predicted run of a unit that a worker holds, by what is known now.
  std::int64_t held_run_us(const HeldUnit& held, WorkerId w) const;

  void place_queued(std::int64_t now_us);
  void place(FairQueue::Candidate candidate, std::int64_t now_us);
  void place_alone(std::int64_t now_us);
  RouteRequest request_for(const Unit& unit, std::int64_t now_us) const;
  std::vector<std::string> avoided(const Unit& unit, std::int64_t now_us) const;
  void assign(Unit& unit, const Route& route, std::int64_t now_us);
  std::string queued_waits_for(const Unit& unit, std::int64_t now_us) const;
  std::string held_waits_for(const Unit& unit, std::int64_t now_us) const;
  void revoke_from_absent(std::int64_t now_us);
  void revoke_for_idle(std::int64_t now_us);
  void request_revoke(const HeldUnit& held, bool lost, std::int64_t now_us);

  SchedulerOptions options_;
  FairQueue queue_;
  Fleet fleet_;
  CostModel costs_;
  JobTable jobs_;
  Recovery recovery_;
  std::vector<int> slots_seen_;  // the most adapter slots of any worker so far, by model
  Actions pending_;
  std::size_t pending_bytes_ = 0;                      // of the specs in pending_.admit
  std::unordered_map<WorkerId, std::size_t> batches_;  // index in pending_.assign
  std::uint64_t round_ = 0;
  int skips_ = 0;                // in this round
  bool met_too_large_ = false;   // a unit in this round; until then no lane is checked
  std::int64_t largest_us_ = 0;  // recent charge
  bool deadlines_held_ = false;
  std::int64_t grace_until_us_ = 0;
};

}  // namespace ditfleet::scheduling
