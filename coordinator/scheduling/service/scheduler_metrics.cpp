#include "coordinator/scheduling/service/scheduler_metrics.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "shared/job/state.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::scheduling {

using telemetry::Counters;
using telemetry::Gauges;
using telemetry::Histograms;

struct SchedulerMetrics::Metrics {
  Counters jobs{"ditfleet_jobs_total"};
  Counters assignments{"ditfleet_assignments_total"};
  Counters revocations{"ditfleet_revocations_total"};
  Counters returned{"ditfleet_units_returned_total"};
  Counters refused{"ditfleet_assignments_refused_total"};
  Counters audits{"ditfleet_scheduler_audits_total"};
  Counters objectives{"ditfleet_objective_jobs_total"};
  Counters tenant_time{"ditfleet_tenant_gpu_seconds_total"};
  Histograms job_time{"ditfleet_job_seconds"};
  Histograms run_time{"ditfleet_unit_run_seconds"};
  Histograms prediction{"ditfleet_prediction_ratio"};
  Histograms wait{"ditfleet_queue_wait_seconds"};
  Histograms decisions{"ditfleet_scheduler_decision_seconds"};
  Gauges ready{"ditfleet_units_ready"};
  Gauges unplaceable{"ditfleet_units_unplaceable"};
  Gauges oldest{"ditfleet_oldest_ready_timestamp_seconds"};
  Gauges held{"ditfleet_units_held"};
  Gauges delayed{"ditfleet_units_delayed"};
  Gauges queued_jobs{"ditfleet_jobs_queued"};
  Gauges open_jobs{"ditfleet_jobs_open"};
  Gauges leads{"ditfleet_scheduler_leading"};
  Gauges clock_held{"ditfleet_redis_clock_held"};
  Gauges epoch{"ditfleet_scheduler_epoch"};
  Gauges workers{"ditfleet_workers"};
  Gauges unwell{"ditfleet_worker_unwell"};
  Gauges backlog{"ditfleet_backlog_gpu_seconds"};
  Gauges tenant_waiting{"ditfleet_tenant_waiting_units"};
  Gauges tenant_lag{"ditfleet_fairness_lag_seconds"};
};

SchedulerMetrics::SchedulerMetrics(std::map<std::string, std::int64_t> objectives_ms)
    : metrics_([]() -> Metrics& {
        static Metrics metrics;
        return metrics;
      }()),
      objectives_ms_(std::move(objectives_ms)) {
  // A rate needs a first sample of 0.
  for (const char* reason : {"warm", "cold"}) metrics_.assignments({reason});
  for (const char* reason : {"lease_lapsed", "retry", "handed_back", "revoked"}) metrics_.returned({reason});
  for (const char* state : {"succeeded", "failed", "canceled", "expired", "rejected"}) metrics_.jobs({state});
}

void SchedulerMetrics::assigned(const std::string& tenant, bool cold, std::int64_t queue_wait_us) {
  metrics_.assignments({cold ? "cold" : "warm"}).Increment();
  metrics_.wait({tenant}).Observe(static_cast<double>(queue_wait_us) / 1e6);
}

void SchedulerMetrics::ran(const std::string& tenant, const std::string& class_key, std::int64_t predicted_us,
                           std::int64_t run_us) {
  const double seconds = static_cast<double>(run_us) / 1e6;
  metrics_.run_time({class_key}).Observe(seconds);
  metrics_.tenant_time({tenant}).Increment(seconds);
  if (predicted_us > 0) metrics_.prediction({class_key}).Observe(seconds / (static_cast<double>(predicted_us) / 1e6));
}

void SchedulerMetrics::revoked(std::size_t units) { metrics_.revocations().Increment(static_cast<double>(units)); }

void SchedulerMetrics::on_event(const queue::Event& event, const ClassOf& class_of) {
  const auto state = job::state_from_name(event.type);
  const bool ended = state && job::is_terminal(*state);
  if (event.unit >= 0) {
    if (event.type == "ready") count_return(event);
    // With its last unit, the scheduler forgets the job.
    if (const auto open = open_.find(event.job); ended && open != open_.end())
      if (const auto found = class_of()) std::tie(open->second.class_key, open->second.model) = *found;
    return;
  }
  if (event.type == "queued") {
    track(event.job, event.at_ms);
    return;
  }
  if (ended) job_ended(event);
}

void SchedulerMetrics::job_ended(const queue::Event& event) {
  metrics_.jobs({event.type}).Increment();
  const auto found = open_.find(event.job);
  if (found == open_.end()) return;
  auto [created_ms, class_key, model] = std::move(found->second);
  open_.erase(found);
  // Jobs that cost nothing, of sizes that nobody ran, must not remove the series of sizes in use.
  if (event.type != "succeeded" && event.type != "failed" && !metrics_.run_time.has({class_key})) class_key = "other";
  const std::int64_t took_ms = event.at_ms - created_ms;
  metrics_.job_time({class_key, event.type}).Observe(static_cast<double>(took_ms) / 1e3);
  const auto objective = objectives_ms_.find(model);
  if (objective == objectives_ms_.end() || event.type == "canceled" || event.type == "rejected") return;
  const bool met = event.type == "succeeded" && took_ms <= objective->second;
  for (const char* result : {"met", "missed"}) metrics_.objectives({class_key, result});
  metrics_.objectives({class_key, met ? "met" : "missed"}).Increment();
}

void SchedulerMetrics::count_return(const queue::Event& event) {
  std::string reason = event.field("reason");
  if (reason.empty() || reason == "retry is due") return;  // admitted; counted when it failed
  std::replace(reason.begin(), reason.end(), ' ', '_');
  metrics_.returned({reason}).Increment();
}

void SchedulerMetrics::refused_assignment() { metrics_.refused().Increment(); }
void SchedulerMetrics::audited() { metrics_.audits().Increment(); }
void SchedulerMetrics::clock_held(bool held) { metrics_.clock_held().Set(held ? 1 : 0); }
void SchedulerMetrics::decision(double seconds) { metrics_.decisions().Observe(seconds); }

void SchedulerMetrics::leading(bool leads, std::int64_t epoch) {
  metrics_.leads().Set(leads ? 1 : 0);
  if (leads) {
    metrics_.epoch().Set(static_cast<double>(epoch));
    open_.clear();  // of an earlier term
    return;
  }
  clock_held(false);
  jobs(0, 0);
  stats({}, Tenants({}));
  backlog({});
}

void SchedulerMetrics::jobs(std::int64_t queued, std::int64_t open) {
  metrics_.queued_jobs().Set(static_cast<double>(queued));
  metrics_.open_jobs().Set(static_cast<double>(open));
}

void SchedulerMetrics::stats(const QueueStats& stats, const Tenants& tenants) {
  metrics_.ready().Set(static_cast<double>(stats.ready));
  metrics_.unplaceable().Set(static_cast<double>(stats.unplaceable));
  metrics_.oldest().Set(static_cast<double>(stats.oldest_ready_us) / 1e6);
  metrics_.held().Set(static_cast<double>(stats.held));
  metrics_.delayed().Set(static_cast<double>(stats.delayed));
  for (const auto state : {WorkerState::kStarting, WorkerState::kReady, WorkerState::kDraining, WorkerState::kSilent,
                           WorkerState::kStuck, WorkerState::kOverdue, WorkerState::kProbing, WorkerState::kGone}) {
    const auto it = stats.workers.find(state);
    metrics_.workers({worker_state_name(state)}).Set(it == stats.workers.end() ? 0.0 : static_cast<double>(it->second));
  }
  for (const auto& [worker, state] : unwell_) metrics_.unwell({worker, worker_state_name(state)}).Set(0);
  unwell_ = stats.unwell;
  for (const auto& [worker, state] : unwell_) metrics_.unwell({worker, worker_state_name(state)}).Set(1);
  const auto waiting = tenants.waiting();
  std::int64_t most = 0;
  for (const auto& [name, tenant] : waiting) most = std::max(most, tenant.virtual_time);
  for (const auto& name : waiting_) {  // those that no longer wait
    metrics_.tenant_waiting({name}).Set(0);
    metrics_.tenant_lag({name}).Set(0);
  }
  waiting_.clear();
  for (const auto& [name, tenant] : waiting) {
    // "other" is the sum of those for whom there is no series.
    const std::string label = waiting_.size() + 1 < telemetry::kMostLabelValues ? name : "other";
    waiting_.insert(label);
    metrics_.tenant_waiting({label}).Increment(static_cast<double>(tenant.units));
    auto lag = metrics_.tenant_lag({label});
    lag.Set(std::max(lag.Value(), static_cast<double>(most - tenant.virtual_time) / 1e6));
  }
}

void SchedulerMetrics::backlog(const queue::FleetForecast& forecast) {
  for (const auto& [model, unused] : forecast.models) models_.insert(model);
  for (const auto& name : models_) {
    const auto it = forecast.models.find(name);
    metrics_.backlog({name}).Set(it == forecast.models.end() ? 0.0 : static_cast<double>(it->second.backlog_us) / 1e6);
  }
}

}  // namespace ditfleet::scheduling
