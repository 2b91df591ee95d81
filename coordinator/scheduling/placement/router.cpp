#include "coordinator/scheduling/placement/router.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

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

std::string describe(const Option& best, const Option& next, const Fleet& fleet, std::size_t places,
                     std::int64_t now_us) {
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

// What workers would do for one unit; counts those that lack nothing for it, by whether a swap is something.
class Offers {
 public:
  Offers(const Fleet& the_fleet, const CostModel& costs, const RouteRequest& the_request, std::int64_t now)
      : fleet(the_fleet),
        request(the_request),
        now_us(now),
        scan(the_fleet.adapters().scan(the_request.adapters, now)),
        costs_(costs),
        cold_us_(costs.observed_cold_us(the_request.model)),
        runs_(costs.runs(the_request.cls, the_request.model, the_request.prior_us)) {}

  Option of(WorkerId w, bool warm) {
    Option option{
        .valid = true, .warm = warm, .worker = w, .start_us = fleet.load(w).start_us(now_us), .need = scan.at(w)};
    option.run_us = runs_(w);
    if (!warm) option.cold_us = cold_us_ ? *cold_us_ : costs_.cold_us(request.model, option.run_us);
    if (warm && option.need.load_us == 0) {
      ++lacking_nothing[1];
      lacking_nothing[0] += option.need.swap_us == 0;
    }
    return option;
  }
  bool takes_it(WorkerId w) const { return fleet.load(w).ready && scan.fits(w); }

  const Fleet& fleet;
  const RouteRequest& request;
  const std::int64_t now_us;
  const Residency::Scan scan;
  std::size_t lacking_nothing[2] = {0, 0};

 private:
  const CostModel& costs_;
  std::optional<std::int64_t> cold_us_;
  CostModel::Runs runs_;
};

// How much later than at best the unit may end for its adapter's sake.
std::int64_t allowed_us(const FinishPolicy::Options& options, const RouteRequest& request, std::int64_t run_us) {
  const auto run = static_cast<double>(run_us);
  const auto most = std::min(options.wait_runs * run, options.tail_part * static_cast<double>(request.tail_us) - run);
  return std::max<std::int64_t>(0, static_cast<std::int64_t>(most) - request.waited_us);
}

// The best of the workers with a place, the next best, and how many there are.
struct Soonest {
  Option best, next;
  std::size_t places = 0;
};

Soonest soonest_with_place(const FinishPolicy& policy, const FinishPolicy::Options& options, Offers& offers) {
  Soonest out;
  auto& [best, next, places] = out;
  std::uint64_t best_hash = 0;
  std::int64_t earliest = 0;
  for (const auto& [free_at_us, w] : offers.fleet.places(offers.request.model)) {
    if (!offers.scan.fits(w)) continue;
    ++places;
    auto option = offers.of(w, offers.fleet.is_warm(offers.request.cls, w));
    if (option.need.load_us > 0) {
      option.bias_us = std::min(policy.bias_us(option.need), allowed_us(options, offers.request, option.run_us));
      option.pushes_out = offers.fleet.adapters().least_worth(w);
    }
    const auto hash = mixed(offers.request.class_hash ^ offers.fleet.load(w).hash);
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
  return out;
}

// Of the workers without a place, the soonest among those that lack nothing, and that lack a swap at most. Those that
// would have to load are not waited for.
std::array<Option, 2> soonest_without_place(Offers& offers, const Promises& promises) {
  std::array<Option, 2> full;
  const auto consider = [&](WorkerId w) {
    if (offers.fleet.load(w).has_slot() || !offers.takes_it(w) || !offers.fleet.is_warm(offers.request.cls, w)) return;
    auto option = offers.of(w, true);
    option.start_us += promises.us(w);
    for (std::size_t kind = option.need.swap_us == 0 ? 0 : 1; kind < 2; ++kind) {
      if (!full[kind].valid || option.finish_us() < full[kind].finish_us()) full[kind] = option;
    }
  };
  if (offers.scan.any()) {
    offers.scan.for_holders(consider);
  } else {
    for (const auto w : offers.fleet.with_model(offers.request.model)) consider(w);
  }
  return full;
}

// A full worker is worth it if it lacks less, and if the whole lane would be through on such ones before the best with
// a place had finished a single unit: then its work is promised to that worker, for this round.
bool waits_for_one(const Offers& offers, const std::array<Option, 2>& full, const Option& best, Promises& promises) {
  const auto& request = offers.request;
  for (std::size_t kind = 0; kind < full.size(); ++kind) {
    const auto& holder = full[kind];
    if (!holder.valid || holder.lacks_us() >= best.lacks_us()) continue;
    const double scale = static_cast<double>(holder.run_us) / static_cast<double>(request.prior_us);
    const auto lane_us = static_cast<std::int64_t>(static_cast<double>(request.lane_work_us) * scale) /
                         static_cast<std::int64_t>(offers.lacking_nothing[kind]);
    const auto work_us = std::max(lane_us, holder.run_us);
    if (std::max(holder.start_us, holder.need.ready_us) + work_us > best.score_us()) continue;
    promises.add(holder.worker, work_us);
    return true;
  }
  return false;
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

void Promises::add(WorkerId w, std::int64_t us) {
  if (w >= us_.size()) us_.resize(w + 1, 0);
  if (us_[w] == 0) to_.push_back(w);
  us_[w] += us;
}

void Promises::clear() {
  for (const auto w : to_) us_[w] = 0;
  to_.clear();
}

std::int64_t FinishPolicy::reach_us(std::int64_t run_us, std::int64_t late_us, std::int64_t tail_us) const {
  return std::min(static_cast<std::int64_t>(options_.reach * static_cast<double>(tail_us)),
                  run_us / 2 + std::max<std::int64_t>(0, late_us));
}

std::int64_t FinishPolicy::yield_us(std::int64_t run_us, std::int64_t waited_us, std::int64_t tail_us) const {
  const bool late = tail_us > 0 && waited_us + run_us > tail_us && waited_us > run_us;
  return late ? static_cast<std::int64_t>(options_.yield * static_cast<double>(tail_us)) : 0;
}

Route FinishPolicy::choose(const Fleet& fleet, const CostModel& costs, const RouteRequest& request,
                           std::int64_t now_us) {
  Offers offers(fleet, costs, request, now_us);
  const auto [best, next, places] = soonest_with_place(*this, options_, offers);
  Route route;
  if (!best.valid) {
    const auto& workers = fleet.with_model(request.model);
    const bool any = std::any_of(workers.begin(), workers.end(), [&](WorkerId w) { return offers.takes_it(w); });
    route.kind = any ? Route::Kind::kNoPlace : Route::Kind::kNoWorker;
    return route;
  }
  if (request.may_wait && request.prior_us > 0 && best.lacks_us() > 0) {
    if (waits_for_one(offers, soonest_without_place(offers, promises_), best, promises_)) {
      route.kind = Route::Kind::kWait;
      route.lacks_us = best.lacks_us();
      return route;
    }
  }
  route.kind = Route::Kind::kAssign;
  route.worker = best.worker;
  route.cold = !best.warm;
  route.lacks_us = best.lacks_us();
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
