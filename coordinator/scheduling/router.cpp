#include "coordinator/scheduling/router.h"

#include <fmt/format.h>

#include <algorithm>

namespace ditfleet::scheduling {
namespace {

// A difference in predicted finish that means nothing: half a millisecond, or this part of the run.
constexpr std::int64_t kTieUs = 500;
constexpr std::int64_t kTieRunDivisor = 50;

std::uint64_t mix(std::uint64_t x) {  // SplitMix64's finalizer
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

struct Option {
  bool valid = false, warm = false;
  WorkerId worker = 0;
  std::int64_t start_us = 0, run_us = 0, cold_us = 0;
  std::int64_t finish_us() const { return start_us + cold_us + run_us; }
};

std::string milliseconds(std::int64_t us) {
  return us < 10'000 ? fmt::format("{:.1f} ms", static_cast<double>(us) / 1000.0) : fmt::format("{} ms", us / 1000);
}

std::string describe(const Option& best, const Option& next, const Fleet& fleet, std::size_t workers,
                     std::int64_t now_us) {
  std::string out = best.warm ? "warm" : "cold (+" + milliseconds(best.cold_us) + ")";
  out += fmt::format("; free in {} + run {}; earliest finish of {} worker{}",
                     milliseconds(std::max<std::int64_t>(0, best.start_us - now_us)), milliseconds(best.run_us), workers,
                     workers == 1 ? "" : "s");
  if (next.valid) {
    out += fmt::format(", then {} in {}", fleet.at(next.worker).name, milliseconds(next.finish_us() - now_us));
  }
  return out;
}

}  // namespace

std::uint64_t rendezvous_hash(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a, then mixed
  for (const unsigned char c : name) hash = (hash ^ c) * 0x100000001b3ULL;
  return mix(hash);
}

Route choose_worker(const Fleet& fleet, const CostModel& costs, const RouteRequest& request, std::int64_t now_us) {
  Option best, next, full_warm;
  std::uint64_t best_hash = 0;
  std::int64_t earliest = 0;
  std::size_t workers = 0, warm_workers = 0;
  for (const auto w : fleet.with_model(request.model)) {
    const auto& worker = fleet.at(w);
    if (worker.standing != Standing::kReady) continue;
    ++workers;
    const bool warm = fleet.is_warm(request.cls, w), slot = worker.has_slot();
    if (!warm && !slot) continue;
    Option option{.valid = true, .warm = warm, .worker = w, .start_us = worker.start_us(now_us)};
    option.run_us = costs.run_us(request.cls, request.model, w, request.prior_us);
    if (option.warm) {
      ++warm_workers;
    } else {
      option.cold_us = costs.cold_us(request.model, option.run_us);
    }
    if (!slot) {
      if (option.warm && (!full_warm.valid || option.finish_us() < full_warm.finish_us())) full_warm = option;
      continue;
    }
    const auto hash = mix(request.class_hash ^ worker.hash);
    const auto tie = std::max(kTieUs, option.run_us / kTieRunDivisor);
    const auto finish = option.finish_us();
    earliest = best.valid ? std::min(earliest, finish) : finish;
    const bool best_ties = best.valid && best.finish_us() <= earliest + tie;
    if (finish <= earliest + tie && (!best_ties || hash > best_hash)) {
      next = best;
      best = option;
      best_hash = hash;
    } else if (!next.valid || option.finish_us() < next.finish_us()) {
      next = option;
    }
  }
  Route route;
  if (workers == 0) return route;
  route.kind = Route::Kind::kWait;
  if (!best.valid) return route;
  if (!best.warm && full_warm.valid && request.may_wait && request.prior_us > 0) {
    const double scale = static_cast<double>(full_warm.run_us) / static_cast<double>(request.prior_us);
    const auto lane_us = static_cast<std::int64_t>(static_cast<double>(request.lane_work_us) * scale) /
                         static_cast<std::int64_t>(warm_workers);
    if (full_warm.start_us + std::max(lane_us, full_warm.run_us) <= best.finish_us()) return route;
  }
  route.kind = Route::Kind::kAssign;
  route.worker = best.worker;
  route.cold = !best.warm;
  route.wait_us = std::max<std::int64_t>(0, best.start_us - now_us);
  route.run_us = best.run_us;
  route.cold_us = best.cold_us;
  route.reason = describe(best, next, fleet, workers, now_us);
  return route;
}

}  // namespace ditfleet::scheduling
