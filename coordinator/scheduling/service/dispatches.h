// What an admission and an assignment that were decided together become: one call.
#pragma once

#include <vector>

#include "coordinator/scheduling/scheduler.h"
#include "shared/queue/types.h"

namespace ditfleet::scheduling {

// Takes out of `actions` the admissions of which at least one unit got a worker in the same decision, with those
// assignments. Raw entries stay: what they become is known only when they are admitted. In the order of the admissions.
std::vector<queue::Dispatch> take_dispatches(Actions& actions);

}  // namespace ditfleet::scheduling
