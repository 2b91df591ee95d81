#include "coordinator/scheduling/placement/earliest_finish_policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "coordinator/scheduling/placement/rendezvous_hash.h"
#include "shared/core/short_numbers.h"

namespace ditfleet::scheduling {
namespace {

// Scores that differ by less are ties: half a millisecond, or this part of the run.
constexpr std::int64_t kTieUs = 500;
constexpr std::int64_t kTieRunDivisor = 50;

struct Candidate {
  bool warm = false;
  WorkerId worker = 0;
  std::int64_t start_us = 0, run_us = 0, penalty_us = 0;
  std::int64_t prepare_us = 0;  // cold class and load of the model
  AdapterNeed need;
  std::int64_t begin_us() const { return std::max(start_us, need.ready_us); }
  std::int64_t finish_us() const { return begin_us() + prepare_us + run_us; }
  std::int64_t score_us() const { return finish_us() + penalty_us; }
  std::int64_t missing_us() const { return need.load_us + need.swap_us + prepare_us; }
};

// One decision.
class Decision {
 public:
  Decision(const EarliestFinishPolicy& policy, const Fleet& fleet, const CostModel& costs, const RouteRequest& request,
           std::int64_t now_us)
      : policy_(policy),
        fleet_(fleet),
        costs_(costs),
        request_(request),
        now_us_(now_us),
        adapters_(fleet.adapters().scan(request.adapters, now_us)),
        observed_cold_us_(costs.observed_cold_us(request.model)),
        runs_(costs.runs(request.cls, request.model, request.prior_us)) {}

  Route route() {
    compare_open_workers();
    Route route;
    if (!best_) {
      const auto& workers = fleet_.with_model(request_.model);
      const bool any = std::any_of(workers.begin(), workers.end(), [this](WorkerId w) { return can_take(w); });
      route.kind = any ? Route::Kind::kNoCapacity : Route::Kind::kNoWorker;
      return route;
    }
    route.missing_us = best_->missing_us();
    if (request_.may_wait && route.missing_us > 0 && full_worker_is_better()) {
      route.kind = Route::Kind::kWait;
      return route;
    }
    route.kind = Route::Kind::kAssign;
    route.worker = best_->worker;
    route.cold = !best_->warm;
    route.run_us = best_->run_us;
    route.load_us = load_us(best_->worker);
    route.cold_us = best_->prepare_us - route.load_us;
    route.need = best_->need;
    route.reason = describe(route);
    return route;
  }

 private:
  bool has_room(WorkerId w) const { return request_.pixels <= fleet_.room(request_.model, w).max_pixels; }
  std::int64_t load_us(WorkerId w) const { return fleet_.room(request_.model, w).load_us; }
  bool can_take(WorkerId w) const {
    return fleet_.load(w).ready && has_room(w) && adapters_.fits(w) && request_.allows(fleet_, w);
  }

  // Also counts the workers that are warm and need no load.
  Candidate candidate(WorkerId w, bool warm) {
    Candidate out{.warm = warm, .worker = w, .start_us = fleet_.load(w).start_us(now_us_), .need = adapters_.at(w)};
    out.run_us = runs_(w);
    if (!warm) out.prepare_us = observed_cold_us_ ? *observed_cold_us_ : costs_.cold_us(request_.model, out.run_us);
    out.prepare_us += load_us(w);
    out.penalty_us = policy_.penalty_us(out.need);
    holders_ += warm && out.need.load_us == 0 && out.prepare_us == 0;
    return out;
  }

  void compare_open_workers() {
    std::uint64_t best_hash = 0;
    std::int64_t lowest_us = 0;
    for (const auto& [free_at_us, w] : fleet_.open_workers(request_.model)) {
      if (!has_room(w) || !adapters_.fits(w) || !request_.allows(fleet_, w)) continue;
      ++open_;
      const auto option = candidate(w, fleet_.is_warm(request_.cls, w));
      const auto hash = mix_bits(request_.lane_hash ^ fleet_.load(w).hash);
      const auto tie_us = std::max(kTieUs, option.run_us / kTieRunDivisor);
      const auto score_us = option.score_us();
      lowest_us = best_ ? std::min(lowest_us, score_us) : score_us;
      const bool best_ties = best_ && best_->score_us() <= lowest_us + tie_us;
      if (score_us <= lowest_us + tie_us && (!best_ties || hash > best_hash)) {
        next_ = best_;
        best_ = option;
        best_hash = hash;
      } else if (!next_ || score_us < next_->score_us()) {
        next_ = option;
      }
    }
  }

  bool full_worker_is_better() {
    std::optional<Candidate> soonest;
    const auto consider = [&](WorkerId w) {
      if (fleet_.load(w).has_capacity() || !can_take(w) || !fleet_.is_warm(request_.cls, w)) return;
      const auto option = candidate(w, true);
      if (option.missing_us() >= best_->missing_us()) return;
      if (!soonest || option.finish_us() < soonest->finish_us()) soonest = option;
    };
    if (adapters_.any()) {
      adapters_.for_holders(consider);
    } else {
      for (const auto w : fleet_.with_model(request_.model)) consider(w);
    }
    if (!soonest || request_.prior_us <= 0) return false;
    const double scale = static_cast<double>(soonest->run_us) / static_cast<double>(request_.prior_us);
    const auto lane_us = static_cast<std::int64_t>(static_cast<double>(request_.lane_work_us) * scale) / holders_;
    return soonest->begin_us() + std::max(lane_us, soonest->run_us) <= best_->score_us();
  }

  std::string describe(const Route& route) const {
    std::string out = best_->warm ? "warm" : "cold (+" + short_duration(route.cold_us) + ")";
    if (route.load_us > 0) out += "; model load " + short_duration(route.load_us);
    const auto* memory = fleet_.memory(request_.model, best_->worker);
    const auto* limit = memory == nullptr ? nullptr : memory->plan_for(request_.pixels);
    if (limit != nullptr && limit->plan != "resident") out += "; plan " + limit->plan;
    if (const int gpus = fleet_.at(best_->worker).gpus; gpus > 1) out += fmt::format("; {} GPUs", gpus);
    if (best_->need.load_us > 0) out += "; adapter load " + short_duration(best_->need.load_us);
    if (best_->need.swap_us > 0) out += "; adapter swap " + short_duration(best_->need.swap_us);
    out += fmt::format("; free in {} + run {}; earliest finish of {} worker{} with capacity",
                       short_duration(std::max<std::int64_t>(0, best_->start_us - now_us_)),
                       short_duration(best_->run_us), open_, open_ == 1 ? "" : "s");
    if (next_)
      out +=
          fmt::format(", then {} in {}", fleet_.at(next_->worker).name, short_duration(next_->finish_us() - now_us_));
    return out;
  }

  const EarliestFinishPolicy& policy_;
  const Fleet& fleet_;
  const CostModel& costs_;
  const RouteRequest& request_;
  const std::int64_t now_us_;
  const Residency::Scan adapters_;
  const std::optional<std::int64_t> observed_cold_us_;
  const CostModel::Runs runs_;
  std::optional<Candidate> best_, next_;  // of the workers with capacity
  int open_ = 0;                          // how many those are
  std::int64_t holders_ = 0;              // warm workers that need no load, of those looked at
};

}  // namespace

Route EarliestFinishPolicy::choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request,
                                   std::int64_t now_us) {
  return Decision(*this, fleet, costs, request, now_us).route();
}

}  // namespace ditfleet::scheduling
