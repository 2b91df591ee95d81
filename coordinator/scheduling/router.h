// The router of the service: a unit goes to the worker with the earliest predicted finish,
//
//   max(free_at, adapters in slots) + cold-class cost + run,
//
// among ready workers that hold the model, have a slot in their look-ahead and room for the adapters. Loading an
// adapter takes room from another, which will be loaded again, and somebody's bandwidth. So a worker that has the
// adapter may finish later by
//
//   min(miss_weight · load · scarcity of what it pushes out,  wait_runs · run,  tail_part · tail - waited - run):
//
// the tail is the latency that one unit in ten exceeds of late. Who is far from it can afford to wait for a holder, who
// would become part of it cannot; and when little is asked for, the tail is short and nobody waits. Where every worker
// is busy a wait is no worker's time lost, another unit takes the place: then what has been waited does not count, and
// the whole tail is the limit.
//
// Equals are parted by what a load would push out, which is to be worth least (residency.h), and by rendezvous hashing
// of class, adapters and worker, so that they keep coming back to the worker that is warm for them.
//
// A full worker may be worth waiting for: if the whole lane would be through on those that lack nothing for it,
// behind all that waits for them already, before the best one with a slot had finished a single unit. So affinity is
// bounded by what it gains, and an adapter that is asked for more than its holders can serve spills to another worker,
// which is then a holder too.
//
// Of a tenant's units of one priority and deadline the one goes first whose arrival and `patience` of its runs (one
// tail at most) come first: short ones pass long ones, none is passed by what comes later than that.
//
// Pure; one decision is one pass over the model's workers.
#pragma once

#include <algorithm>
#include <string_view>

#include "coordinator/scheduling/routing_policy.h"

namespace ditfleet::scheduling {

class FinishPolicy final : public RoutingPolicy {
 public:
  struct Options {
    double miss_weight = 16.0;
    double wait_runs = 1.5;
    double tail_part = 0.8;
    double patience = 2.0;
  };
  explicit FinishPolicy(Options options) : options_(options) {}
  std::string_view name() const override { return "finish"; }
  Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) override;
  void begin_round() override;
  std::int64_t patience_us(std::int64_t run_us, std::int64_t tail_us) const override {
    return std::min(static_cast<std::int64_t>(options_.patience * static_cast<double>(run_us)), tail_us);
  }
  std::int64_t bias_us(const AdapterNeed& need) const override {
    return static_cast<std::int64_t>(options_.miss_weight * need.scarcity * static_cast<double>(need.load_us));
  }
  Eviction eviction() const override { return Eviction::kLeastWorth; }

 private:
  Options options_;
  // Work that was told to wait for a worker, this round.
  std::vector<std::int64_t> promised_us_;
  std::vector<WorkerId> promised_;
};

// As a FinishPolicy with nothing promised.
Route choose_worker(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us);

std::uint64_t rendezvous_hash(std::string_view name);
std::uint64_t mixed(std::uint64_t x);  // SplitMix64's finalizer

}  // namespace ditfleet::scheduling
