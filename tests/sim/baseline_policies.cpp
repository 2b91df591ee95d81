#include "tests/sim/baseline_policies.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <string_view>

#include "coordinator/scheduling/placement/rendezvous_hash.h"
#include "coordinator/simulation/random.h"

namespace ditfleet::simulation {
namespace {

using scheduling::AdapterId;
using scheduling::CostModel;
using scheduling::Fleet;
using scheduling::Residency;
using scheduling::Route;
using scheduling::RouteRequest;
using scheduling::RoutingPolicy;
using scheduling::WorkerId;

// One decision among the model's ready workers that have enough adapter slots.
struct Choice {
  const Fleet& fleet;
  const CostModel& costs;
  const RouteRequest& request;
  std::int64_t now_us;
  Residency::Scan scan = fleet.adapters().scan(request.adapters, now_us);
  std::vector<WorkerId> open = {};  // with spare capacity
  std::size_t workers = 0;          // with or without
  std::int64_t total_us = 0;        // predicted backlog of all

  std::int64_t backlog_us(WorkerId w) const { return fleet.load(w).start_us(now_us) - now_us; }
  WorkerId least_loaded() const {
    return *std::min_element(open.begin(), open.end(),
                             [this](WorkerId a, WorkerId b) { return backlog_us(a) < backlog_us(b); });
  }
  Route assign(WorkerId w, std::string_view why) const {
    Route route;
    route.kind = Route::Kind::kAssign;
    route.worker = w;
    route.cold = !fleet.is_warm(request.cls, w);
    route.run_us = costs.run_us(request.cls, request.model, w, request.prior_us);
    if (route.cold) route.cold_us = costs.cold_us(request.model, route.run_us);
    route.need = scan.at(w);
    route.reason = why;
    return route;
  }
};

class Baseline final : public RoutingPolicy {
 public:
  // `choose` is called with at least one open worker.
  explicit Baseline(std::function<Route(const Choice&)> choose) : choose_(std::move(choose)) {}
  Route choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) override {
    Choice choice{.fleet = fleet, .costs = costs, .request = request, .now_us = now_us};
    for (const auto w : fleet.with_model(request.model)) {
      const auto& load = fleet.load(w);
      if (!load.ready || !choice.scan.fits(w)) continue;
      ++choice.workers;
      choice.total_us += choice.backlog_us(w);
      if (load.has_capacity()) choice.open.push_back(w);
    }
    if (!choice.open.empty()) return choose_(choice);
    Route route;
    route.kind = choice.workers == 0 ? Route::Kind::kNoWorker : Route::Kind::kNoCapacity;
    return route;
  }

 private:
  std::function<Route(const Choice&)> choose_;
};

}  // namespace

std::unique_ptr<RoutingPolicy> round_robin() {
  return std::make_unique<Baseline>([turn = std::size_t{0}](const Choice& choice) mutable {
    // The first id from the turn on, wrapping around.
    const auto next = *std::min_element(choice.open.begin(), choice.open.end(), [&](WorkerId a, WorkerId b) {
      return std::pair(a < turn, a) < std::pair(b < turn, b);
    });
    turn = next + 1;
    return choice.assign(next, "in turn");
  });
}

std::unique_ptr<RoutingPolicy> least_loaded() {
  return std::make_unique<Baseline>(
      [](const Choice& choice) { return choice.assign(choice.least_loaded(), "least loaded"); });
}

std::unique_ptr<RoutingPolicy> bounded_rendezvous(double bound) {
  return std::make_unique<Baseline>([bound](const Choice& choice) {
    const auto& fleet = choice.fleet;
    const auto& request = choice.request;
    const auto run = choice.costs.typical_run_us(request.cls, request.model, request.prior_us);
    const double mean = static_cast<double>(choice.total_us + run) / static_cast<double>(choice.workers);
    const auto most = std::max(run, static_cast<std::int64_t>(bound * mean));
    auto key = request.lane_hash;
    if (!request.adapters.empty()) {  // whatever the class: an adapter has one home
      key = 0;
      for (const auto a : request.adapters)
        key = scheduling::mix_bits(key ^ scheduling::rendezvous_hash(fleet.adapters().name(a)));
    }
    std::uint64_t highest = 0;
    bool any = false;
    WorkerId chosen = 0;
    for (const auto w : choice.open) {
      if (choice.backlog_us(w) + run > most) continue;
      const auto hash = scheduling::mix_bits(key ^ fleet.load(w).hash);
      if (any && hash <= highest) continue;
      any = true;
      highest = hash;
      chosen = w;
    }
    return any ? choice.assign(chosen, "highest hash within the bound")
               : choice.assign(choice.least_loaded(), "least loaded");
  });
}

std::unique_ptr<RoutingPolicy> llm_d_ladder(double affinity_weight) {
  return std::make_unique<Baseline>([affinity_weight, random = Random(0)](const Choice& choice) mutable {
    std::int64_t shortest = std::numeric_limits<std::int64_t>::max(), longest = 0;
    for (const auto w : choice.open) {
      const auto backlog = choice.backlog_us(w);
      shortest = std::min(shortest, backlog);
      longest = std::max(longest, backlog);
    }
    double best = -1;
    std::size_t ties = 0;
    WorkerId chosen = 0;
    for (const auto w : choice.open) {
      double ladder = 0;
      if (choice.scan.any()) {
        const auto need = choice.scan.at(w);
        if (need.swap_us == 0) {
          ladder = 1.0;
        } else if (choice.fleet.adapters().has_spare_slot(w)) {
          ladder = 0.8;
        } else if (need.load_us == 0) {
          ladder = 0.6;
        }
      }
      const double queue = longest == shortest ? 1.0
                                               : static_cast<double>(longest - choice.backlog_us(w)) /
                                                     static_cast<double>(longest - shortest);
      const double score = affinity_weight * ladder + queue;
      if (score < best) continue;
      ties = score > best ? 1 : ties + 1;  // reservoir sampling
      best = score;
      if (ties == 1 || random.below(ties) == 0) chosen = w;
    }
    return choice.assign(chosen, "highest score");
  });
}

std::unique_ptr<RoutingPolicy> ray_multiplex(double matching_timeout_ms) {
  const auto timeout_us = static_cast<std::int64_t>(matching_timeout_ms * 1000);
  return std::make_unique<Baseline>([timeout_us, random = Random(0)](const Choice& choice) mutable {
    const auto of_two = [&](const std::vector<WorkerId>& workers) {
      const auto first = random.below(workers.size());
      if (workers.size() == 1) return workers[first];
      const auto a = workers[first], b = workers[(first + 1 + random.below(workers.size() - 1)) % workers.size()];
      return choice.backlog_us(a) <= choice.backlog_us(b) ? a : b;
    };
    const auto& adapters = choice.fleet.adapters();
    const auto& request = choice.request;
    if (!choice.scan.any()) return choice.assign(of_two(choice.open), "the less loaded of two");
    std::vector<WorkerId> holders;
    for (const auto w : choice.open) {
      if (choice.scan.at(w).load_us == 0) holders.push_back(w);
    }
    if (!holders.empty()) return choice.assign(of_two(holders), "the less loaded of two holders");
    const bool held =
        std::any_of(request.adapters.begin(), request.adapters.end(), [&](AdapterId a) { return adapters.is_held(a); });
    if (held && request.may_wait && request.waited_us < timeout_us) {
      Route wait;
      wait.kind = Route::Kind::kWait;
      return wait;
    }
    std::size_t fewest = std::numeric_limits<std::size_t>::max();
    for (const auto w : choice.open) fewest = std::min(fewest, adapters.held_count(w));
    for (const auto w : choice.open) {
      if (adapters.held_count(w) == fewest) holders.push_back(w);
    }
    return choice.assign(of_two(holders), "the less loaded of two with the fewest adapters");
  });
}

}  // namespace ditfleet::simulation
