#include "coordinator/scheduling/scheduler_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>

#include "shared/telemetry/metrics.h"

namespace ditfleet::scheduling {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;
using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;

struct SchedulerMetrics::Families {
  prometheus::Registry& r = telemetry::registry();
  Family<Counter>& jobs = BuildCounter().Name("ditfleet_jobs_total").Help("Jobs that have ended, by final state").Register(r);
  Family<Counter>& assignments = BuildCounter().Name("ditfleet_assignments_total").Help("Units given to workers, by whether the worker was warm for their class").Register(r);
  Counter& warm = assignments.Add({{"reason", "warm"}});
  Counter& cold = assignments.Add({{"reason", "cold"}});
  Counter& revocations = BuildCounter().Name("ditfleet_revocations_total").Help("Assigned units asked back before they started").Register(r).Add({});
  Counter& refused = BuildCounter().Name("ditfleet_assignments_refused_total").Help("Assignments that Redis refused because the unit was not ready").Register(r).Add({});
  Counter& audits = BuildCounter().Name("ditfleet_scheduler_audits_total").Help("Comparisons of the scheduler's state with Redis").Register(r).Add({});
  Histogram& wait = BuildHistogram().Name("ditfleet_queue_wait_seconds").Help("From ready to assigned").Register(r).Add(
      {}, Histogram::BucketBoundaries{0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800});
  Histogram& decisions = BuildHistogram().Name("ditfleet_scheduler_decision_seconds").Help("Time of one round of decisions").Register(r).Add(
      {}, Histogram::BucketBoundaries{0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05});
  Gauge& ready = BuildGauge().Name("ditfleet_units_ready").Help("Units that wait for a worker").Register(r).Add({});
  Gauge& held = BuildGauge().Name("ditfleet_units_held").Help("Units assigned to or running on workers").Register(r).Add({});
  Gauge& delayed = BuildGauge().Name("ditfleet_units_delayed").Help("Units that wait for their retry").Register(r).Add({});
  Gauge& open_jobs = BuildGauge().Name("ditfleet_jobs_open").Help("Jobs that have not ended").Register(r).Add({});
  Gauge& leads = BuildGauge().Name("ditfleet_scheduler_leading").Help("1 while this coordinator leads its shard").Register(r).Add({});
  Gauge& epoch = BuildGauge().Name("ditfleet_scheduler_epoch").Help("Epoch of this coordinator's last leadership").Register(r).Add({});
  Family<Gauge>& workers = BuildGauge().Name("ditfleet_workers").Help("Registered workers, by state").Register(r);
};

SchedulerMetrics::SchedulerMetrics()
    : families_([]() -> Families& {
        static Families families;
        return families;
      }()) {}

void SchedulerMetrics::assigned(bool cold, std::int64_t queue_wait_us) {
  (cold ? families_.cold : families_.warm).Increment();
  families_.wait.Observe(static_cast<double>(queue_wait_us) / 1e6);
}

void SchedulerMetrics::revoked() { families_.revocations.Increment(); }

void SchedulerMetrics::job_ended(std::string_view state) {
  families_.jobs.Add({{"state", std::string(state)}}).Increment();
}

void SchedulerMetrics::refused_assignment() { families_.refused.Increment(); }
void SchedulerMetrics::audited() { families_.audits.Increment(); }
void SchedulerMetrics::decision(double seconds) { families_.decisions.Observe(seconds); }

void SchedulerMetrics::leading(bool leads, std::int64_t epoch) {
  families_.leads.Set(leads ? 1 : 0);
  if (leads) families_.epoch.Set(static_cast<double>(epoch));
}

void SchedulerMetrics::census(const Census& census) {
  families_.ready.Set(static_cast<double>(census.ready));
  families_.held.Set(static_cast<double>(census.held));
  families_.delayed.Set(static_cast<double>(census.delayed));
  families_.open_jobs.Set(static_cast<double>(census.jobs));
  for (const auto standing : {Standing::kStarting, Standing::kReady, Standing::kDraining, Standing::kSilent, Standing::kGone}) {
    const auto it = census.workers.find(standing);
    families_.workers.Add({{"state", std::string(standing_name(standing))}})
        .Set(it == census.workers.end() ? 0.0 : static_cast<double>(it->second));
  }
}

}  // namespace ditfleet::scheduling
