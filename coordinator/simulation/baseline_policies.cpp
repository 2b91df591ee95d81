#include "coordinator/simulation/baseline_policies.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "coordinator/scheduling/placement/rendezvous_hash.h"

namespace ditfleet::simulation {

using scheduling::AdapterId;
using scheduling::CostModel;
using scheduling::Fleet;
using scheduling::Residency;
using scheduling::Route;
using scheduling::RouteRequest;
using scheduling::WorkerId;

namespace {

// The model's ready workers that have enough adapter slots.
struct Candidates {
  std::vector<WorkerId> open;  // with spare capacity
  std::size_t workers = 0;     // with or without
  std::int64_t total_us = 0;   // predicted backlog of all
  Residency::Scan scan;
};

Candidates candidates(const Fleet& fleet, const RouteRequest& request, std::int64_t now_us) {
  Candidates out;
  out.scan = fleet.adapters().scan(request.adapters, now_us);
  for (const auto w : fleet.with_model(request.model)) {
    const auto& load = fleet.load(w);
    if (!load.ready || !out.scan.fits(w)) continue;
    ++out.workers;
    out.total_us += load.start_us(now_us) - now_us;
    if (load.has_capacity()) out.open.push_back(w);
  }
  return out;
}

std::int64_t backlog_us(const Fleet& fleet, WorkerId w, std::int64_t now_us) {
  return fleet.load(w).start_us(now_us) - now_us;
}

Route none(const Candidates& found) {
  Route route;
  route.kind = found.workers == 0 ? Route::Kind::kNoWorker : Route::Kind::kNoCapacity;
  return route;
}

Route assign(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, const Candidates& found,
             WorkerId w, std::string_view why) {
  Route route;
  route.kind = Route::Kind::kAssign;
  route.worker = w;
  route.cold = !fleet.is_warm(request.cls, w);
  route.run_us = costs.run_us(request.cls, request.model, w, request.prior_us);
  if (route.cold) route.cold_us = costs.cold_us(request.model, route.run_us);
  route.need = found.scan.at(w);
  route.reason = why;
  return route;
}

template <class Items, class Load>
WorkerId least(const Items& workers, Load load) {
  return *std::min_element(workers.begin(), workers.end(), [&](WorkerId a, WorkerId b) { return load(a) < load(b); });
}

}  // namespace

Route RoundRobinPolicy::choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request,
                               std::int64_t now_us) {
  const auto found = candidates(fleet, request, now_us);
  if (found.open.empty()) return none(found);
  // The first id from the turn on, wrapping around.
  const auto next = std::min_element(found.open.begin(), found.open.end(), [&](WorkerId a, WorkerId b) {
    return std::pair(a < turn_, a) < std::pair(b < turn_, b);
  });
  turn_ = *next + 1;
  return assign(fleet, costs, request, found, *next, "in turn");
}

Route LeastLoadedPolicy::choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request,
                                std::int64_t now_us) {
  const auto found = candidates(fleet, request, now_us);
  if (found.open.empty()) return none(found);
  const auto w = least(found.open, [&](WorkerId c) { return backlog_us(fleet, c, now_us); });
  return assign(fleet, costs, request, found, w, "least loaded");
}

Route BoundedRendezvousPolicy::choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request,
                                      std::int64_t now_us) {
  const auto found = candidates(fleet, request, now_us);
  if (found.open.empty()) return none(found);
  const auto run = costs.typical_run_us(request.cls, request.model, request.prior_us);
  const double mean = static_cast<double>(found.total_us + run) / static_cast<double>(found.workers);
  const auto bound = std::max(run, static_cast<std::int64_t>(bound_ * mean));
  auto key = request.lane_hash;
  if (!request.adapters.empty()) {  // whatever the class: an adapter has one home
    key = 0;
    for (const auto a : request.adapters)
      key = scheduling::mix_bits(key ^ scheduling::rendezvous_hash(fleet.adapters().name(a)));
  }
  std::uint64_t highest = 0;
  bool any = false;
  WorkerId chosen = 0;
  for (const auto w : found.open) {
    if (backlog_us(fleet, w, now_us) + run > bound) continue;
    const auto hash = scheduling::mix_bits(key ^ fleet.load(w).hash);
    if (any && hash <= highest) continue;
    any = true;
    highest = hash;
    chosen = w;
  }
  if (!any) chosen = least(found.open, [&](WorkerId c) { return backlog_us(fleet, c, now_us); });
  return assign(fleet, costs, request, found, chosen, any ? "highest hash within the bound" : "least loaded");
}

Route LadderPolicy::choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request,
                           std::int64_t now_us) {
  const auto found = candidates(fleet, request, now_us);
  if (found.open.empty()) return none(found);
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max(), longest = 0;
  for (const auto w : found.open) {
    const auto backlog = backlog_us(fleet, w, now_us);
    shortest = std::min(shortest, backlog);
    longest = std::max(longest, backlog);
  }
  double best = -1;
  std::size_t ties = 0;
  WorkerId chosen = 0;
  for (const auto w : found.open) {
    double ladder = 0;
    if (found.scan.any()) {
      const auto need = found.scan.at(w);
      if (need.swap_us == 0) {
        ladder = 1.0;
      } else if (fleet.adapters().has_spare_slot(w)) {
        ladder = 0.8;
      } else if (need.load_us == 0) {
        ladder = 0.6;
      }
    }
    const double queue = longest == shortest ? 1.0
                                             : static_cast<double>(longest - backlog_us(fleet, w, now_us)) /
                                                   static_cast<double>(longest - shortest);
    const double score = weight_ * ladder + queue;
    if (score < best) continue;
    ties = score > best ? 1 : ties + 1;  // reservoir sampling
    best = score;
    if (ties == 1 || random_.below(ties) == 0) chosen = w;
  }
  return assign(fleet, costs, request, found, chosen, "highest score");
}

Route MultiplexPolicy::choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request,
                              std::int64_t now_us) {
  const auto found = candidates(fleet, request, now_us);
  if (found.open.empty()) return none(found);
  const auto of_two = [&](const std::vector<WorkerId>& workers) {
    const auto first = random_.below(workers.size());
    if (workers.size() == 1) return workers[first];
    const auto a = workers[first], b = workers[(first + 1 + random_.below(workers.size() - 1)) % workers.size()];
    return backlog_us(fleet, a, now_us) <= backlog_us(fleet, b, now_us) ? a : b;
  };
  if (!found.scan.any()) return assign(fleet, costs, request, found, of_two(found.open), "the less loaded of two");
  std::vector<WorkerId> holders;
  for (const auto w : found.open) {
    if (found.scan.at(w).load_us == 0) holders.push_back(w);
  }
  if (!holders.empty()) return assign(fleet, costs, request, found, of_two(holders), "the less loaded of two holders");
  const bool held = std::any_of(request.adapters.begin(), request.adapters.end(),
                                [&](AdapterId a) { return fleet.adapters().is_held(a); });
  if (held && request.may_wait && request.waited_us < timeout_us_) {
    Route wait;
    wait.kind = Route::Kind::kWait;
    return wait;
  }
  std::size_t fewest = std::numeric_limits<std::size_t>::max();
  for (const auto w : found.open) fewest = std::min(fewest, fleet.adapters().held_count(w));
  for (const auto w : found.open) {
    if (fleet.adapters().held_count(w) == fewest) holders.push_back(w);
  }
  return assign(fleet, costs, request, found, of_two(holders), "the less loaded of two with the fewest adapters");
}

}  // namespace ditfleet::simulation
