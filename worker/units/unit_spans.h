// The spans of a unit: its time in the queue, and its root span in this process.
#pragma once

#include "worker/units/unit.h"

namespace ditfleet::worker {

// Starts the unit's span and records its time in the queue, both as children of the job's traceparent.
void begin_span(Unit& unit);
// Ends the unit's span with its outcome. Only the first call has an effect.
void end_span(Unit& unit, const char* outcome);

}  // namespace ditfleet::worker
