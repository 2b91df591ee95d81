// The router of the service: a unit goes to the worker with the earliest predicted finish,
//
//   max(free_at, adapters in slots) + cold-class cost + run,
//
// among ready workers that hold the model, have a slot in their look-ahead and room for the adapters. Loading an
// adapter takes room from another, which will be loaded again, and somebody's bandwidth. So a worker that has the
// adapter may finish later by
//
//   min(miss_weight · load · scarcity of what it pushes out,  wait_runs · run - waited,  tail_part · tail - waited -
//   run):
//
// the tail is the latency that one unit in twenty exceeds of late. Who is far from it can afford to wait for a holder,
// who would become part of it cannot; and when little is asked for, the tail is short and nobody waits.
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
// tail at most) come first: short ones pass long ones, none is passed by what comes later than that. Two exceptions:
//
// - Where the next one would have to load, one behind it goes that finds what it needs on that very worker. It is due
// no
//   later than half a run of the one that it passes, and as much as that is late already, `reach` of the tail at most.
// - One that has waited so long that it would end beyond the tail, and longer than its run, is due `yield` tails later,
//   once: it is late in any case, those behind it need not be. One unit in twenty at most does so (scheduler.h), and
//   none past the age bound. What it costs is the tail's end: their wait.
//
// Pure; one decision is one pass over the model's workers that have a place, and the holders of the unit's adapters.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "coordinator/scheduling/placement/routing_policy.h"

namespace ditfleet::scheduling {

// Work that was told to wait for a worker, this round.
class Promises {
 public:
  std::int64_t us(WorkerId w) const { return w < us_.size() ? us_[w] : 0; }
  void add(WorkerId w, std::int64_t us);
  void clear();

 private:
  std::vector<std::int64_t> us_;
  std::vector<WorkerId> to_;
};

class FinishPolicy final : public RoutingPolicy {
 public:
  struct Options {
    double miss_weight = 16.0;
    double wait_runs = 1.5;
    double tail_part = 0.6;
    double patience = 1.5;
    double reach = 0.5;
    double yield = 1.0;
  };
  explicit FinishPolicy(Options options) : options_(options) {}
  std::string_view name() const override { return "finish"; }
  Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) override;
  void begin_round() override { promises_.clear(); }
  std::int64_t patience_us(std::int64_t run_us, std::int64_t tail_us) const override {
    return patience_of(options_.patience, run_us, tail_us);
  }
  std::int64_t reach_us(std::int64_t run_us, std::int64_t late_us, std::int64_t tail_us) const override;
  std::int64_t yield_us(std::int64_t run_us, std::int64_t waited_us, std::int64_t tail_us) const override;
  std::int64_t bias_us(const AdapterNeed& need) const override {
    return static_cast<std::int64_t>(options_.miss_weight * need.scarcity * static_cast<double>(need.load_us));
  }
  Eviction eviction() const override { return Eviction::kLeastWorth; }

 private:
  Options options_;
  Promises promises_;
};

// As a FinishPolicy with nothing promised.
Route choose_worker(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us);

std::uint64_t rendezvous_hash(std::string_view name);
std::uint64_t mixed(std::uint64_t x);  // SplitMix64's finalizer

}  // namespace ditfleet::scheduling
