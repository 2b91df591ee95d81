// The spans of a unit in this process: its time in the queue, and the one that all of its others hang below.
#pragma once

#include "worker/units/unit.h"

namespace ditfleet::worker {

// The unit's own span, and before it the time in the queue, both below the job's traceparent.
void begin_span(Unit& unit);
// How it ended here; the span's end. Only the first counts.
void end_span(Unit& unit, const char* outcome);

}  // namespace ditfleet::worker
