// Routing policies of other systems, implemented from their documentation, as baselines for the service's policy. All
// use the same predicted costs as the measure of load, and choose among ready workers that have the model, spare
// capacity and enough adapter slots. A tenant's units run in the order of arrival; workers evict the least recently
// used adapter.
#pragma once

#include <memory>

#include "coordinator/scheduling/placement/routing_policy.h"

namespace ditfleet::simulation {

std::unique_ptr<scheduling::RoutingPolicy> round_robin();

// The worker that is free soonest.
std::unique_ptr<scheduling::RoutingPolicy> least_loaded();

// Rendezvous hashing with bounded loads: of the workers whose load stays within `bound` times the mean, the one with
// the highest hash. Hashes the adapters and the worker; for a unit without adapters, the class and the worker.
std::unique_ptr<scheduling::RoutingPolicy> bounded_rendezvous(double bound);

// llm-d's scorers. The LoRA affinity score (1.0: active, 0.8: a slot is free, 0.6: loading, else 0) times
// `affinity_weight`, plus the queue score (1 for the shortest queue, 0 for the longest). Draws among equal scores.
std::unique_ptr<scheduling::RoutingPolicy> llm_d_ladder(double affinity_weight);

// Ray Serve's model multiplexing. Draws two workers that hold the adapter and chooses the less loaded one. While all
// holders are full, it waits up to `matching_timeout_ms`. Then it draws two of the workers with the fewest adapters.
std::unique_ptr<scheduling::RoutingPolicy> ray_multiplex(double matching_timeout_ms);

}  // namespace ditfleet::simulation
