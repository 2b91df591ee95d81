// What the scheduler tells Prometheus. Thread safe, as prometheus-cpp is.
#pragma once

#include <string_view>

#include "coordinator/scheduling/scheduler.h"

namespace ditfleet::scheduling {

class SchedulerMetrics : public Observer {
 public:
  SchedulerMetrics();  // registers the families; one object a process
  void assigned(bool cold, std::int64_t queue_wait_us) override;
  void revoked() override;
  void job_ended(std::string_view state);
  void refused_assignment();
  void audited();
  void decision(double seconds);
  void leading(bool leads, std::int64_t epoch);
  void census(const Census& census);

 private:
  struct Families;
  Families& families_;
};

}  // namespace ditfleet::scheduling
