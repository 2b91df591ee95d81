// What others route by, behind the interface of the service's own router, with the same predicted costs as measure of
// load and the same bounds (ready workers with the model, room for the adapters and a slot in their look-ahead).
// Written from their documentation, to be compared with; workers drop what they used least recently. They keep the
// order of arrival, unless given the router's `patience` (router.h).
#pragma once

#include <cstdint>
#include <string_view>

#include "coordinator/scheduling/placement/routing_policy.h"

namespace ditfleet::scheduling {

class BaselinePolicy : public RoutingPolicy {
 public:
  explicit BaselinePolicy(double patience) : patience_(patience) {}
  std::int64_t patience_us(std::int64_t run_us, std::int64_t tail_us) const override {
    return patience_of(patience_, run_us, tail_us);
  }

 private:
  double patience_;
};

// The same numbers each time. Not for secrets.
class Draws {
 public:
  std::size_t below(std::size_t n);

 private:
  std::uint64_t state_ = 0;
};

// The next one in turn.
class RoundRobinPolicy final : public BaselinePolicy {
 public:
  using BaselinePolicy::BaselinePolicy;
  std::string_view name() const override { return "round_robin"; }
  Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) override;

 private:
  std::size_t turn_ = 0;
};

// The one that is free soonest.
class LeastLoadedPolicy final : public BaselinePolicy {
 public:
  using BaselinePolicy::BaselinePolicy;
  std::string_view name() const override { return "least_loaded"; }
  Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) override;
};

// Rendezvous hashing of adapters (without any: of the class) and worker with bounded loads: the first in the order of
// hashes whose load stays within `bound` times the mean.
class BoundedRendezvousPolicy final : public BaselinePolicy {
 public:
  BoundedRendezvousPolicy(double bound, double patience) : BaselinePolicy(patience), bound_(bound) {}
  std::string_view name() const override { return "bounded_rendezvous"; }
  Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) override;

 private:
  double bound_;
};

// llm-d's scorers: the LoRA affinity ladder (1.0 active, 0.8 room for another, 0.6 on its way, else 0) times
// `affinity_weight`, plus how short the worker's queue is between the longest and the shortest; any of equals.
class LadderPolicy final : public BaselinePolicy {
 public:
  LadderPolicy(double affinity_weight, double patience) : BaselinePolicy(patience), weight_(affinity_weight) {}
  std::string_view name() const override { return "llm_d_ladder"; }
  Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) override;

 private:
  double weight_;
  Draws random_;
};

// Ray Serve's multiplexing: the less loaded of two, drawn at random, of those that hold the adapter; while all of them
// are full it waits up to `matching_timeout_ms`, then takes two of those with the fewest adapters, then any two.
class MultiplexPolicy final : public BaselinePolicy {
 public:
  MultiplexPolicy(double matching_timeout_ms, double patience)
      : BaselinePolicy(patience), timeout_us_(static_cast<std::int64_t>(matching_timeout_ms * 1000)) {}
  std::string_view name() const override { return "ray_multiplex"; }
  Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) override;

 private:
  std::int64_t timeout_us_;
  Draws random_;
};

}  // namespace ditfleet::scheduling
