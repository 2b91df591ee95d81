// Which worker a unit goes to: the one with the earliest predicted finish, free_at + cold-class cost + run,
// among ready workers that hold the model. Equals are parted by rendezvous hashing of class and worker, so
// that a class keeps coming back to the worker that is warm for it.
//
// A full worker may be worth waiting for: if the whole lane would be through on the warm workers before an
// idle cold one had finished a single unit, the lane waits.
//
// Pure; one decision is one pass over the model's workers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "coordinator/scheduling/cost_model.h"
#include "coordinator/scheduling/fleet.h"

namespace ditfleet::scheduling {

struct RouteRequest {
  ClassId cls = 0;
  ModelId model = 0;
  std::uint64_t class_hash = 0;
  std::int64_t prior_us = 0;
  std::int64_t lane_work_us = 0;  // priors of all that waits in the lane, this unit included
  bool may_wait = true;           // false for aged units: they take whoever has a slot
};

struct Route {
  enum class Kind { kAssign, kWait, kNoWorker };
  Kind kind = Kind::kNoWorker;  // kWait: every slot is taken, or a warm one is worth waiting for
  WorkerId worker = 0;
  bool cold = false;
  std::int64_t wait_us = 0, run_us = 0, cold_us = 0;
  std::string reason;  // with the numbers, for the `assigned` event; only of kAssign
};

Route choose_worker(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us);

std::uint64_t rendezvous_hash(std::string_view name);

}  // namespace ditfleet::scheduling
