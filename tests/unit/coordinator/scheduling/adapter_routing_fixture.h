// A fleet whose workers report adapters, for tests of routing policies.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "coordinator/scheduling/placement/routing_policy.h"

namespace ditfleet::scheduling {

constexpr std::int64_t kSecond = 1'000'000;
constexpr std::int64_t kAdapterBytes = 100'000'000;  // loads in 0.1 s at 1 GB/s

class AdapterRouting : public ::testing::Test {
 protected:
  queue::WorkerInfo info(const std::string& name, std::vector<std::string> slots, std::vector<std::string> host = {}) {
    queue::WorkerInfo out;
    out.name = name;
    out.boot = "1";
    out.state = "ready";
    out.models = {"m"};
    out.warm_classes = {"m/256x256x1/none/64/fp32"};
    out.adapter_slots = 2;
    out.host_adapter_bytes = 4 * kAdapterBytes;
    out.adapter_swap_us = 50'000;
    out.adapters = std::move(slots);
    out.host_adapters = std::move(host);
    return out;
  }
  void update(const std::vector<queue::WorkerInfo>& infos) {
    fleet.update(infos, 0, [](const std::string&) { return ModelId{0}; });
    fleet.define_class(0, "m/256x256x1/none/64/fp32");
  }
  AdapterId adapter(const std::string& name) {
    const auto a = fleet.adapters().intern(name);
    fleet.adapters().set_size(a, kAdapterBytes);
    return a;
  }
  RouteRequest request(const std::vector<AdapterId>& adapters, std::int64_t lane_work = kSecond) {
    return {.lane_hash = 7, .prior_us = kSecond, .lane_work_us = lane_work, .adapters = adapters};
  }
  void hold(const std::string& name, int unit, std::int64_t run) {
    fleet.hold(fleet.intern_owner(name + ":1"), {.ref = {"j", unit}, .run_us = run});
  }
  std::string chosen(RoutingPolicy& policy, const RouteRequest& r) {
    const auto route = policy.choose(fleet, costs, r, 0);
    return route.kind == Route::Kind::kAssign     ? fleet.at(route.worker).name
           : route.kind == Route::Kind::kNoWorker ? "nobody"
                                                  : "wait";
  }
  Fleet fleet{2, 3 * kSecond};
  CostModel costs;
};

}  // namespace ditfleet::scheduling
