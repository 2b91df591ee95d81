// The scheduler's metrics. Call on_event(), track() and on_gap() from one thread; the other functions are thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "coordinator/scheduling/scheduler.h"
#include "shared/queue/types.h"

namespace ditfleet::scheduling {

class SchedulerMetrics final : public SchedulerObserver {
 public:
  // The class and model of an event's job, before the scheduler has processed the event.
  using ClassOf = std::function<std::optional<std::pair<std::string, std::string>>()>;

  // Registers the metrics; one object per process. `objectives_ms`: in which a model's jobs should end, by model.
  explicit SchedulerMetrics(std::map<std::string, std::int64_t> objectives_ms);
  void assigned(const std::string& tenant, bool cold, std::int64_t queue_wait_us) override;
  void ran(const std::string& tenant, const std::string& class_key, std::int64_t predicted_us,
           std::int64_t run_us) override;
  void revoked(std::size_t units);
  // Counts jobs that end and units that must run again. Measures the duration of jobs that were passed to track().
  void on_event(const queue::Event& event, const ClassOf& class_of);
  void track(const std::string& job, std::int64_t created_ms) { open_[job].created_ms = created_ms; }
  // Events are missing: jobs that are open now are not timed.
  void on_gap() { open_.clear(); }
  void refused_assignment();
  void audited();
  void decision(double seconds);
  void clock_held(bool held);
  // Without the leadership all gauges of the shard are 0, so that the sum over all coordinators is correct.
  void leading(bool leads, std::int64_t epoch);
  void jobs(std::int64_t queued, std::int64_t open);
  void stats(const QueueStats& stats, const Tenants& tenants);
  void backlog(const queue::FleetForecast& forecast);

 private:
  struct Metrics;
  void count_return(const queue::Event& event);
  void job_ended(const queue::Event& event);

  Metrics& metrics_;
  const std::map<std::string, std::int64_t> objectives_ms_;
  struct Open {
    std::int64_t created_ms = 0;
    std::string class_key = "unknown", model;  // once a unit has ended
  };
  std::unordered_map<std::string, Open> open_;
  std::set<std::string> waiting_;              // tenants in the last stats()
  std::map<std::string, WorkerState> unwell_;  // workers in the last stats()
  std::set<std::string> models_;               // with a backlog gauge
};

}  // namespace ditfleet::scheduling
