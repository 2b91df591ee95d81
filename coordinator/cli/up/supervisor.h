// Runs what `ditfleet up` planned: starts it in order, starts again what dies, ends it in order.
#pragma once

#include "coordinator/cli/up/up_plan.h"

namespace ditfleet::cli {

// Blocks until SIGINT or SIGTERM, or until there is no point in going on. Returns the exit code. Afterwards
// none of its processes is left and the ready file is gone.
// Call it once, from the main thread of a process that has no other.
int supervise(UpPlan plan);

}  // namespace ditfleet::cli
