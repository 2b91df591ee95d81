// What the scheduler tells Prometheus. `told` from one thread; the rest is thread safe, as prometheus-cpp is.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>

#include "coordinator/scheduling/scheduler.h"
#include "shared/queue/types.h"

namespace ditfleet::scheduling {

class SchedulerMetrics : public Observer {
 public:
  SchedulerMetrics();  // registers the families; one object a process
  void assigned(bool cold, std::int64_t queue_wait_us) override;
  void revoked() override;
  // Every event of the feed: counts the jobs that end and the units that have to run again, and times jobs whose
  // beginning is known.
  void told(const queue::Event& event);
  void open_since(const std::string& job, std::int64_t created_ms) {
    open_[job].queued_ms = created_ms;
  }                                        // from before the feed was followed
  void missed_events() { open_.clear(); }  // what began before is not timed
  void refused_assignment();
  void audited();
  void decision(double seconds);
  // The shard's figures are the leader's: who leads no more says 0, so that those of all coordinators add up.
  void leading(bool leads, std::int64_t epoch);
  void jobs(std::int64_t queued, std::int64_t open);
  void census(const QueueStats& census);

 private:
  struct Families;
  struct Open {
    std::int64_t queued_ms = 0;
    std::map<int, std::int64_t> started_ms;  // by running unit
  };
  void count_return(const queue::Event& event);
  void unit_told(Open& open, const queue::Event& event);

  Families& families_;
  std::unordered_map<std::string, Open> open_;
};

}  // namespace ditfleet::scheduling
