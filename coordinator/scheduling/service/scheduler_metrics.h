// The scheduler's metrics. Call on_event(), track() and on_gap() from one thread; the other functions are thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>

#include "coordinator/scheduling/scheduler.h"
#include "shared/queue/types.h"

namespace ditfleet::scheduling {

class SchedulerMetrics {
 public:
  SchedulerMetrics();  // registers the metric families; one object per process
  void assigned(bool cold, std::int64_t queue_wait_us);
  void revoked(std::size_t units);
  // Counts jobs that end and units that must run again. Measures the duration of jobs that were passed to track().
  void on_event(const queue::Event& event);
  void track(const std::string& job, std::int64_t created_ms) { open_[job].queued_ms = created_ms; }
  // Events are missing: jobs that are open now are not timed.
  void on_gap() { open_.clear(); }
  void refused_assignment();
  void audited();
  void decision(double seconds);
  // Without the leadership all gauges of the shard are 0, so that the sum over all coordinators is correct.
  void leading(bool leads, std::int64_t epoch);
  void jobs(std::int64_t queued, std::int64_t open);
  void stats(const QueueStats& stats);
  void backlog(const queue::FleetForecast& forecast);

 private:
  struct Families;
  struct Open {
    std::int64_t queued_ms = 0;
    std::map<int, std::int64_t> started_ms;  // by unit
  };
  void count_return(const queue::Event& event);
  void on_unit_event(Open& open, const queue::Event& event);

  Families& families_;
  std::unordered_map<std::string, Open> open_;
  std::set<std::string> models_;  // with a backlog gauge
};

}  // namespace ditfleet::scheduling
