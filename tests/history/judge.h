// What must hold in every history.
#pragma once

#include <string>

#include "tests/history/fleet.h"

namespace ditfleet::history {

// At any time: the records and the sets of the queue agree, so that the states partition the units and jobs. Returns
// what does not; empty: nothing.
std::string disagreement(RedisModel& redis);

// At the end of a history.
//  - Each acknowledged job has ended, once, in a state that its nature and the faults allow; no job was made twice.
//  - The events of each job are a valid history (tests/fault/job_history.h).
//  - A result has the right bytes, and is that of the attempt that completed its unit. No other result is left.
//  - Nothing is left of the jobs but their records.
//  - Without faults each unit has run once.
std::string verdict(Fleet& fleet);

}  // namespace ditfleet::history
