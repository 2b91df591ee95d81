// Brings the job table in line with the stored units: after a start, a takeover, or whenever events may be missing.
//
// No I/O, no clock; not thread-safe. Times are microseconds of Redis' clock.
#pragma once

#include <cstdint>
#include <span>

#include "coordinator/scheduling/job_table.h"

namespace ditfleet::scheduling {

class Recovery {
 public:
  // The arguments must outlive it.
  Recovery(JobTable& jobs, Fleet& fleet, CostModel& costs) : jobs_(jobs), fleet_(fleet), costs_(costs) {}

  // Fills the empty table. The fleet must be up to date.
  void rebuild(std::span<const queue::UnitView> open, std::int64_t now_us);
  // As in Scheduler.
  void audit(std::span<const queue::UnitView> open, std::int64_t now_us);
  void begin_audit() { wanted_ = false; }
  void request_audit() { wanted_ = true; }
  bool wants_audit() const { return wanted_; }  // requested since the latest one began

 private:
  Job& job_of(const queue::UnitView& view, std::int64_t now_us);
  void apply(const queue::UnitView& view, std::int64_t now_us);

  JobTable& jobs_;
  Fleet& fleet_;
  CostModel& costs_;
  bool wanted_ = false;
};

}  // namespace ditfleet::scheduling
