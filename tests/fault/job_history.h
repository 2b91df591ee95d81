// Judges the event stream of a job.
#pragma once

#include <string>
#include <vector>

#include "shared/queue/types.h"

namespace ditfleet::testing {

struct HistoryRules {
  int max_attempts = 5;  // starts of one unit, after errors and crashes
  bool must_have_ended = true;
};

// Returns the first fault in `events`, the complete stream of one job, or an empty string. In a valid history:
// - Ids grow.
// - The job is queued exactly once, by the first event.
// - Each unit goes ready → assigned → started → end, or back to ready. `started` matches the `assigned` before it.
// - Only a started unit has steps. Steps never go back within an attempt; a step may repeat if its reply was lost.
// - No event of a unit follows its end.
// - The job ends exactly once, by the last event, after all of its units and in the state of one of them.
std::string faults_in(const std::vector<queue::Event>& events, const HistoryRules& rules = {});

}  // namespace ditfleet::testing
