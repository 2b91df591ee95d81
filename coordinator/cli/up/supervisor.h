// Runs the processes of `ditfleet up`: starts them in order, restarts those that end, stops them in order.
#pragma once

#include "coordinator/cli/up/up_plan.h"

namespace ditfleet::cli {

// Blocks until SIGINT, SIGTERM or a failure that a restart cannot fix. Returns the exit code. Afterwards all processes
// have ended and the ready file is removed. Call it once, from the only thread of the process.
int supervise(UpPlan plan);

}  // namespace ditfleet::cli
