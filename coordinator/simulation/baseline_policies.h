// Routing policies of other systems, implemented from their documentation, as baselines for the service's policy. All
// use the same predicted costs as the measure of load, and choose among ready workers that have the model, spare
// capacity and enough adapter slots. A tenant's units run in the order of arrival; workers evict the least recently
// used adapter.
#pragma once

#include <cstdint>

#include "coordinator/scheduling/placement/routing_policy.h"
#include "coordinator/simulation/random.h"

namespace ditfleet::simulation {

// Round robin.
class RoundRobinPolicy final : public scheduling::RoutingPolicy {
 public:
  scheduling::Route choose(const scheduling::Fleet& fleet, const scheduling::CostModel& costs,
                           const scheduling::RouteRequest& request, std::int64_t now_us) override;

 private:
  std::size_t turn_ = 0;
};

// The worker that is free soonest.
class LeastLoadedPolicy final : public scheduling::RoutingPolicy {
 public:
  scheduling::Route choose(const scheduling::Fleet& fleet, const scheduling::CostModel& costs,
                           const scheduling::RouteRequest& request, std::int64_t now_us) override;
};

// Rendezvous hashing with bounded loads: of the workers whose load stays within `bound` times the mean, the one with
// the highest hash. Hashes the adapters and the worker; for a unit without adapters, the class and the worker.
class BoundedRendezvousPolicy final : public scheduling::RoutingPolicy {
 public:
  explicit BoundedRendezvousPolicy(double bound) : bound_(bound) {}
  scheduling::Route choose(const scheduling::Fleet& fleet, const scheduling::CostModel& costs,
                           const scheduling::RouteRequest& request, std::int64_t now_us) override;

 private:
  double bound_;
};

// llm-d's scorers. The LoRA affinity score (1.0: active, 0.8: a slot is free, 0.6: loading, else 0) times
// `affinity_weight`, plus the queue score (1 for the shortest queue, 0 for the longest). Draws among equal scores.
class LadderPolicy final : public scheduling::RoutingPolicy {
 public:
  explicit LadderPolicy(double affinity_weight) : weight_(affinity_weight) {}
  scheduling::Route choose(const scheduling::Fleet& fleet, const scheduling::CostModel& costs,
                           const scheduling::RouteRequest& request, std::int64_t now_us) override;

 private:
  double weight_;
  Random random_{0};
};

// Ray Serve's model multiplexing. Draws two workers that hold the adapter and chooses the less loaded one. While all
// holders are full, it waits up to `matching_timeout_ms`. Then it draws two of the workers with the fewest adapters.
class MultiplexPolicy final : public scheduling::RoutingPolicy {
 public:
  explicit MultiplexPolicy(double matching_timeout_ms)
      : timeout_us_(static_cast<std::int64_t>(matching_timeout_ms * 1000)) {}
  scheduling::Route choose(const scheduling::Fleet& fleet, const scheduling::CostModel& costs,
                           const scheduling::RouteRequest& request, std::int64_t now_us) override;

 private:
  std::int64_t timeout_us_;
  Random random_{0};
};

}  // namespace ditfleet::simulation
