#include "coordinator/scheduling/router.h"

#include <fmt/format.h>

#include <algorithm>

namespace ditfleet::scheduling {
namespace {

// A difference in predicted finish that means nothing: half a millisecond, or this part of the run.
constexpr std::int64_t kTieUs = 500;
constexpr std::int64_t kTieRunDivisor = 50;

struct Option {
  bool valid = false, warm = false;
  WorkerId worker = 0;
  std::int64_t start_us = 0, run_us = 0, cold_us = 0, bias_us = 0;
  double pushes_out = 0;
  AdapterNeed need;
  std::int64_t finish_us() const { return std::max(start_us, need.ready_us) + cold_us + run_us; }
  std::int64_t score_us() const { return finish_us() + bias_us; }
  // What this worker lacks for the unit.
  std::int64_t lacks_us() const { return need.load_us + need.swap_us + cold_us; }
};

std::string milliseconds(std::int64_t us) {
  return us < 10'000 ? fmt::format("{:.1f} ms", static_cast<double>(us) / 1000.0) : fmt::format("{} ms", us / 1000);
}

std::string describe(const Option& best, const Option& next, const Fleet& fleet, std::size_t places, std::int64_t now_us) {
  std::string out = best.warm ? "warm" : "cold (+" + milliseconds(best.cold_us) + ")";
  if (best.need.load_us > 0) out += "; adapter load " + milliseconds(best.need.load_us);
  if (best.need.swap_us > 0) out += "; adapter swap " + milliseconds(best.need.swap_us);
  out += fmt::format("; free in {} + run {}; earliest finish of {} worker{} with a place",
                     milliseconds(std::max<std::int64_t>(0, best.start_us - now_us)), milliseconds(best.run_us), places,
                     places == 1 ? "" : "s");
  if (next.valid) {
    out += fmt::format(", then {} in {}", fleet.at(next.worker).name, milliseconds(next.finish_us() - now_us));
  }
  return out;
}

}  // namespace

std::uint64_t mixed(std::uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

std::uint64_t rendezvous_hash(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a, then mixed
  for (const unsigned char c : name) hash = (hash ^ c) * 0x100000001b3ULL;
  return mixed(hash);
}

void FinishPolicy::begin_round() {
  for (const auto w : promised_) promised_us_[w] = 0;
  promised_.clear();
}

std::int64_t FinishPolicy::reach_us(std::int64_t run_us, std::int64_t late_us, std::int64_t tail_us) const {
  return std::min(static_cast<std::int64_t>(options_.reach * static_cast<double>(tail_us)), run_us / 2 + std::max<std::int64_t>(0, late_us));
}

std::int64_t FinishPolicy::yield_us(std::int64_t run_us, std::int64_t waited_us, std::int64_t tail_us) const {
  const bool late = tail_us > 0 && waited_us + run_us > tail_us && waited_us > run_us;
  return late ? static_cast<std::int64_t>(options_.yield * static_cast<double>(tail_us)) : 0;
}

Route FinishPolicy::choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) {
  Option best, next;
  // Of the workers without a slot, the soonest among those that lack nothing, and that lack a swap at most; how many.
  Option full[2];
  std::size_t lacking_nothing[2] = {0, 0};
  std::uint64_t best_hash = 0;
  std::int64_t earliest = 0;
  std::size_t places = 0;
  const auto scan = fleet.adapters().scan(request.adapters, now_us);
  const auto cold_us = costs.observed_cold_us(request.model);
  const auto runs = costs.runs(request.cls, request.model, request.prior_us);
  // How much later than at best the unit may end for its adapter's sake.
  const auto allowed_us = [&](std::int64_t run_us) {
    const auto run = static_cast<double>(run_us);
    const auto most = std::min(options_.wait_runs * run, options_.tail_part * static_cast<double>(request.tail_us) - run);
    return std::max<std::int64_t>(0, static_cast<std::int64_t>(most) - request.waited_us);
  };
  const auto option_on = [&](WorkerId w, bool warm) {
    Option option{.valid = true, .warm = warm, .worker = w, .start_us = fleet.load(w).start_us(now_us), .need = scan.at(w)};
    option.run_us = runs(w);
    if (!warm) option.cold_us = cold_us ? *cold_us : costs.cold_us(request.model, option.run_us);
    if (warm && option.need.load_us == 0) {
      ++lacking_nothing[1];
      lacking_nothing[0] += option.need.swap_us == 0;
    }
    return option;
  };
  for (const auto& [free_at_us, w] : fleet.places(request.model)) {
    if (!scan.fits(w)) continue;
    ++places;
    auto option = option_on(w, fleet.is_warm(request.cls, w));
    if (option.need.load_us > 0) {
      option.bias_us = std::min(bias_us(option.need), allowed_us(option.run_us));
      option.pushes_out = fleet.adapters().least_worth(w);
    }
    const auto hash = mixed(request.class_hash ^ fleet.load(w).hash);
    const auto tie = std::max(kTieUs, option.run_us / kTieRunDivisor);
    const auto score = option.score_us();
    earliest = best.valid ? std::min(earliest, score) : score;
    const bool best_ties = best.valid && best.score_us() <= earliest + tie;
    const bool better = option.pushes_out != best.pushes_out ? option.pushes_out < best.pushes_out : hash > best_hash;
    if (score <= earliest + tie && (!best_ties || better)) {
      next = best;
      best = option;
      best_hash = hash;
    } else if (!next.valid || score < next.score_us()) {
      next = option;
    }
  }
  const auto takes_it = [&](WorkerId w) { return fleet.load(w).ready && scan.fits(w); };
  Route route;
  if (!best.valid) {
    const auto& workers = fleet.with_model(request.model);
    if (std::none_of(workers.begin(), workers.end(), takes_it)) return route;
  }
  route.kind = Route::Kind::kNoPlace;
  if (!best.valid) return route;
  route.kind = Route::Kind::kWait;
  route.lacks_us = best.lacks_us();
  const auto consider_full = [&](WorkerId w) {
    if (fleet.load(w).has_slot() || !takes_it(w) || !fleet.is_warm(request.cls, w)) return;
    auto option = option_on(w, true);
    if (w < promised_us_.size()) option.start_us += promised_us_[w];
    for (int kind = option.need.swap_us == 0 ? 0 : 1; kind < 2; ++kind) {
      if (!full[kind].valid || option.finish_us() < full[kind].finish_us()) full[kind] = option;
    }
  };
  // Full workers that would have to load are not waited for.
  if (request.may_wait && best.lacks_us() > 0) {
    if (scan.any()) {
      scan.for_holders(consider_full);
    } else {
      for (const auto w : fleet.with_model(request.model)) consider_full(w);
    }
  }
  for (int kind = 0; kind < 2 && request.may_wait && request.prior_us > 0; ++kind) {
    const auto& holder = full[kind];
    if (!holder.valid || holder.lacks_us() >= best.lacks_us()) continue;
    const double scale = static_cast<double>(holder.run_us) / static_cast<double>(request.prior_us);
    const auto lane_us = static_cast<std::int64_t>(static_cast<double>(request.lane_work_us) * scale) /
                         static_cast<std::int64_t>(lacking_nothing[kind]);
    const auto through_us = std::max(holder.start_us, holder.need.ready_us) + std::max(lane_us, holder.run_us);
    if (through_us > best.score_us()) continue;
    if (holder.worker >= promised_us_.size()) promised_us_.resize(holder.worker + 1, 0);
    if (promised_us_[holder.worker] == 0) promised_.push_back(holder.worker);
    promised_us_[holder.worker] += std::max(lane_us, holder.run_us);
    return route;
  }
  route.kind = Route::Kind::kAssign;
  route.worker = best.worker;
  route.cold = !best.warm;
  route.wait_us = std::max<std::int64_t>(0, best.start_us - now_us);
  route.run_us = best.run_us;
  route.cold_us = best.cold_us;
  route.need = best.need;
  route.reason = describe(best, next, fleet, places, now_us);
  return route;
}

Route choose_worker(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) {
  return FinishPolicy({}).choose(fleet, costs, request, now_us);
}

}  // namespace ditfleet::scheduling
