// Judges what a job's event stream says happened to it.
#pragma once

#include <string>
#include <vector>

#include "shared/queue/types.h"

namespace ditfleet::testing {

struct HistoryRules {
  int max_attempts = 5;  // starts of one unit: errors and crashes together
  bool must_have_ended = true;
};

// What is wrong with `events`, all that the stream of one job holds, from its beginning; empty: nothing. Right is:
// ids grow; the job is queued once, first; each unit goes ready → assigned → started → end, or back to ready;
// only a started unit takes steps, which never go back within an attempt (one is told twice when the answer to its
// first telling was lost); nothing follows the end of a unit; the job ends
// exactly once, last, after all of its units, as they ended; `started` agrees with the `assigned` before it.
std::string faults_in(const std::vector<queue::Event>& events, const HistoryRules& rules = {});

}  // namespace ditfleet::testing
