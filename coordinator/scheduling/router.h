// The router of the service: a unit goes to the worker with the earliest predicted finish,
//
//   max(free_at, adapters in slots) + cold-class cost + run,
//
// among ready workers that hold the model, have a slot in their look-ahead and room for the adapters. Loading an
// adapter costs more than the time this unit waits for it (it takes room from another, and somebody's bandwidth), so
// up to `miss_weight` times the load is added, the more the fewer hold what it pushes out. Equals are parted by what a load would push out, which is to be worth least
// (residency.h), and by rendezvous hashing of class, adapters and worker, so that they keep coming back to the worker
// that is warm for them.
//
// A unit that no worker with a slot has the adapter for, and that would only queue there, is kept until the worker is
// nearly free: until then another may come free, and the worker may get a unit that it has the adapter for. It is kept
// for `defer_part` of its run at most.
//
// A full worker may be worth waiting for: if the whole lane would be through on those that lack nothing for it,
// behind all that waits for them already, before the best one with a slot had finished a single unit. So affinity is
// bounded by what it gains, and an adapter that is asked for more than its holders can serve spills to another worker,
// which is then a holder too.
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
    double miss_weight = 8.0;
    double defer_part = 0.25;
  };
  explicit FinishPolicy(Options options) : options_(options) {}
  std::string_view name() const override { return "finish"; }
  Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) override;
  void begin_round() override;
  std::int64_t bias_us(const AdapterNeed& need) const override {
    return static_cast<std::int64_t>(std::max(1.0, options_.miss_weight * need.scarcity) * static_cast<double>(need.load_us));
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
