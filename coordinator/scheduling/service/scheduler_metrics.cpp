#include "coordinator/scheduling/service/scheduler_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>

#include <algorithm>

#include "shared/job/state.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::scheduling {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;
using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;

namespace {

const Histogram::BucketBoundaries kJobSeconds = {0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1,   2.5,
                                                 5,    10,    30,   60,  120,  300, 1800};

}  // namespace

struct SchedulerMetrics::Families {
  prometheus::Registry& r = telemetry::registry();
  Family<Counter>& jobs =
      BuildCounter().Name("ditfleet_jobs_total").Help("Jobs that have ended, by final state").Register(r);
  Family<Counter>& assignments = BuildCounter()
                                     .Name("ditfleet_assignments_total")
                                     .Help("Units assigned to workers, by whether the worker was warm for their class")
                                     .Register(r);
  Counter& warm = assignments.Add({{"reason", "warm"}});
  Counter& cold = assignments.Add({{"reason", "cold"}});
  Counter& revocations = BuildCounter()
                             .Name("ditfleet_revocations_total")
                             .Help("Requests to take back units that have not started")
                             .Register(r)
                             .Add({});
  Family<Counter>& returned =
      BuildCounter().Name("ditfleet_units_returned_total").Help("Units returned to the queue, by reason").Register(r);
  Counter& refused = BuildCounter()
                         .Name("ditfleet_assignments_refused_total")
                         .Help("Assignments that Redis rejected because the unit was not ready")
                         .Register(r)
                         .Add({});
  Counter& audits = BuildCounter()
                        .Name("ditfleet_scheduler_audits_total")
                        .Help("Comparisons of the scheduler's state with Redis")
                        .Register(r)
                        .Add({});
  Family<Histogram>& job_time = BuildHistogram()
                                    .Name("ditfleet_job_seconds")
                                    .Help("Time from submission to the end of a job, by final state")
                                    .Register(r);
  Histogram& run_time = BuildHistogram()
                            .Name("ditfleet_unit_run_seconds")
                            .Help("Run time of units that succeeded")
                            .Register(r)
                            .Add({}, kJobSeconds);
  Histogram& wait = BuildHistogram()
                        .Name("ditfleet_queue_wait_seconds")
                        .Help("Time from ready to assigned")
                        .Register(r)
                        .Add({}, Histogram::BucketBoundaries{0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5,
                                                             10, 30, 60, 300, 1800});
  Histogram& decisions =
      BuildHistogram()
          .Name("ditfleet_scheduler_decision_seconds")
          .Help("Time to make one round of scheduling decisions")
          .Register(r)
          .Add({}, Histogram::BucketBoundaries{0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05});
  Gauge& ready = BuildGauge().Name("ditfleet_units_ready").Help("Units waiting for a worker").Register(r).Add({});
  Gauge& unplaceable = BuildGauge()
                           .Name("ditfleet_units_unplaceable")
                           .Help("Ready units for which no registered worker has the model and enough adapter slots")
                           .Register(r)
                           .Add({});
  Gauge& held =
      BuildGauge().Name("ditfleet_units_held").Help("Units assigned to or running on workers").Register(r).Add({});
  Gauge& delayed =
      BuildGauge().Name("ditfleet_units_delayed").Help("Units waiting for their retry").Register(r).Add({});
  Gauge& queued_jobs = BuildGauge().Name("ditfleet_jobs_queued").Help("Jobs waiting for admission").Register(r).Add({});
  Gauge& open_jobs = BuildGauge().Name("ditfleet_jobs_open").Help("Jobs that have not ended").Register(r).Add({});
  Gauge& leads = BuildGauge()
                     .Name("ditfleet_scheduler_leading")
                     .Help("1 while this coordinator leads its shard")
                     .Register(r)
                     .Add({});
  Gauge& epoch = BuildGauge()
                     .Name("ditfleet_scheduler_epoch")
                     .Help("Epoch of this coordinator's latest leadership")
                     .Register(r)
                     .Add({});
  Family<Gauge>& workers = BuildGauge().Name("ditfleet_workers").Help("Registered workers, by state").Register(r);
};

SchedulerMetrics::SchedulerMetrics()
    : families_([]() -> Families& {
        static Families families;
        return families;
      }()) {
  // A rate needs a first sample of 0.
  for (const char* reason : {"lease_lapsed", "retry", "handed_back", "revoked"})
    families_.returned.Add({{"reason", reason}});
  for (const char* state : {"succeeded", "failed", "canceled", "expired", "rejected"})
    families_.jobs.Add({{"state", state}});
}

void SchedulerMetrics::assigned(bool cold, std::int64_t queue_wait_us) {
  (cold ? families_.cold : families_.warm).Increment();
  families_.wait.Observe(static_cast<double>(queue_wait_us) / 1e6);
}

void SchedulerMetrics::revoked() { families_.revocations.Increment(); }

void SchedulerMetrics::on_event(const queue::Event& event) {
  if (event.type == "step" || event.type == "preview") return;
  if (event.unit >= 0) {
    if (event.type == "ready") count_return(event);
    if (const auto open = open_.find(event.job); open != open_.end()) on_unit_event(open->second, event);
    return;
  }
  if (event.type == "queued") {
    open_[event.job].queued_ms = event.at_ms;
    return;
  }
  const auto state = job::state_from_name(event.type);
  if (!state || !job::is_terminal(*state)) return;
  families_.jobs.Add({{"state", event.type}}).Increment();
  const auto open = open_.find(event.job);
  if (open == open_.end()) return;
  families_.job_time.Add({{"state", event.type}}, kJobSeconds)
      .Observe(static_cast<double>(event.at_ms - open->second.queued_ms) / 1e3);
  open_.erase(open);
}

void SchedulerMetrics::count_return(const queue::Event& event) {
  const auto field = event.fields.find("reason");
  if (field == event.fields.end() || field->second == "retry is due") return;  // counted when it failed
  std::string reason = field->second;
  std::replace(reason.begin(), reason.end(), ' ', '_');
  families_.returned.Add({{"reason", reason}}).Increment();
}

void SchedulerMetrics::on_unit_event(Open& open, const queue::Event& event) {
  if (event.type == "started") {
    open.started_ms[event.unit] = event.at_ms;
    return;
  }
  const auto started = open.started_ms.find(event.unit);
  if (started == open.started_ms.end()) return;
  if (event.type == "succeeded") families_.run_time.Observe(static_cast<double>(event.at_ms - started->second) / 1e3);
  open.started_ms.erase(started);  // the unit may start again
}

void SchedulerMetrics::refused_assignment() { families_.refused.Increment(); }
void SchedulerMetrics::audited() { families_.audits.Increment(); }
void SchedulerMetrics::decision(double seconds) { families_.decisions.Observe(seconds); }

void SchedulerMetrics::leading(bool leads, std::int64_t epoch) {
  families_.leads.Set(leads ? 1 : 0);
  if (leads) {
    families_.epoch.Set(static_cast<double>(epoch));
    open_.clear();  // of an earlier term
    return;
  }
  jobs(0, 0);
  stats({});
}

void SchedulerMetrics::jobs(std::int64_t queued, std::int64_t open) {
  families_.queued_jobs.Set(static_cast<double>(queued));
  families_.open_jobs.Set(static_cast<double>(open));
}

void SchedulerMetrics::stats(const QueueStats& stats) {
  families_.ready.Set(static_cast<double>(stats.ready));
  families_.unplaceable.Set(static_cast<double>(stats.unplaceable));
  families_.held.Set(static_cast<double>(stats.held));
  families_.delayed.Set(static_cast<double>(stats.delayed));
  for (const auto state : {WorkerState::kStarting, WorkerState::kReady, WorkerState::kDraining, WorkerState::kSilent,
                           WorkerState::kStuck, WorkerState::kOverdue, WorkerState::kProbing, WorkerState::kGone}) {
    const auto it = stats.workers.find(state);
    families_.workers.Add({{"state", std::string(worker_state_name(state))}})
        .Set(it == stats.workers.end() ? 0.0 : static_cast<double>(it->second));
  }
}

}  // namespace ditfleet::scheduling
