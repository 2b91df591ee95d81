#include "coordinator/scheduling/service/scheduler_metrics.h"

#include <algorithm>

#include "shared/job/state.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::scheduling {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;

namespace {

const Histogram::BucketBoundaries kJobSeconds = {0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1,   2.5,
                                                 5,    10,    30,   60,  120,  300, 1800};

}  // namespace

struct SchedulerMetrics::Families {
  Family<Counter>& jobs = telemetry::counters("ditfleet_jobs_total", "Jobs that have ended, by final state");
  Family<Counter>& assignments = telemetry::counters(
      "ditfleet_assignments_total", "Units assigned to workers, by whether the worker was warm for their class");
  Counter& warm = assignments.Add({{"reason", "warm"}});
  Counter& cold = assignments.Add({{"reason", "cold"}});
  Counter& revocations =
      telemetry::counters("ditfleet_revocations_total", "Requests to take back units that have not started").Add({});
  Family<Counter>& returned =
      telemetry::counters("ditfleet_units_returned_total", "Units returned to the queue, by reason");
  Counter& refused = telemetry::counters("ditfleet_assignments_refused_total",
                                         "Assignments that Redis rejected because the unit was not ready")
                         .Add({});
  Counter& audits =
      telemetry::counters("ditfleet_scheduler_audits_total", "Comparisons of the scheduler's state with Redis").Add({});
  Family<Histogram>& job_time =
      telemetry::histograms("ditfleet_job_seconds", "Time from submission to the end of a job, by final state");
  Histogram& run_time =
      telemetry::histograms("ditfleet_unit_run_seconds", "Run time of units that succeeded").Add({}, kJobSeconds);
  Histogram& wait = telemetry::histograms("ditfleet_queue_wait_seconds", "Time from ready to assigned")
                        .Add({}, Histogram::BucketBoundaries{0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5,
                                                             10, 30, 60, 300, 1800});
  Histogram& decisions =
      telemetry::histograms("ditfleet_scheduler_decision_seconds", "Time to make one round of scheduling decisions")
          .Add({}, Histogram::BucketBoundaries{0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05});
  Gauge& ready = telemetry::gauges("ditfleet_units_ready", "Units waiting for a worker").Add({});
  Gauge& unplaceable =
      telemetry::gauges("ditfleet_units_unplaceable",
                        "Ready units for which no registered worker has the model and enough adapter slots")
          .Add({});
  Gauge& held = telemetry::gauges("ditfleet_units_held", "Units assigned to or running on workers").Add({});
  Gauge& delayed = telemetry::gauges("ditfleet_units_delayed", "Units waiting for their retry").Add({});
  Gauge& queued_jobs = telemetry::gauges("ditfleet_jobs_queued", "Jobs waiting for admission").Add({});
  Gauge& open_jobs = telemetry::gauges("ditfleet_jobs_open", "Jobs that have not ended").Add({});
  Gauge& leads = telemetry::gauges("ditfleet_scheduler_leading", "1 while this coordinator leads its shard").Add({});
  Gauge& epoch = telemetry::gauges("ditfleet_scheduler_epoch", "Epoch of this coordinator's latest leadership").Add({});
  Family<Gauge>& backlog = telemetry::gauges("ditfleet_backlog_gpu_seconds",
                                             "Predicted run time of the units that have not ended, by model");
  Family<Gauge>& workers = telemetry::gauges("ditfleet_workers", "Registered workers, by state");
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

void SchedulerMetrics::revoked(std::size_t units) { families_.revocations.Increment(static_cast<double>(units)); }

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
  backlog({});
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

void SchedulerMetrics::backlog(const queue::FleetForecast& forecast) {
  for (const auto& [model, unused] : forecast.models) models_.insert(model);
  for (const auto& name : models_) {
    const auto it = forecast.models.find(name);
    families_.backlog.Add({{"model", name}})
        .Set(it == forecast.models.end() ? 0.0 : static_cast<double>(it->second.backlog_us) / 1e6);
  }
}

}  // namespace ditfleet::scheduling
