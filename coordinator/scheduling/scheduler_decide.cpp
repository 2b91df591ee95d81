// Scheduler: assigning and revoking units.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "coordinator/scheduling/scheduler.h"

namespace ditfleet::scheduling {
namespace {

constexpr std::int64_t kRevokeAgainUs = 1'000'000;
// Moving a unit to an idle worker wastes what its holder has prepared, so it must gain at least this.
constexpr std::int64_t kMoveGainUs = 200'000;
// Lanes that may wait for a full worker in one round. Bounds the cost of a decision.
constexpr int kMaxSkips = 16;
// A unit avoids a worker on which it failed for so long, and longer if the worker has since failed others only.
constexpr std::int64_t kAvoidUs = 30'000'000;
constexpr int kFailuresAvoided = 3;
// The share of the ready workers that may run units alone: one in four, but at least one worker.
constexpr std::int64_t kAloneShare = 4;

}  // namespace

Actions Scheduler::decide(std::int64_t now_us) {
  batches_.clear();
  place_alone(now_us);
  if (queue_.size() > 0) place_queued(now_us);
  pending_bytes_ = 0;
  return std::exchange(pending_, {});
}

void Scheduler::place_queued(std::int64_t now_us) {
  ++round_;
  skips_ = 0;
  met_too_large_ = false;
  const auto& lanes = jobs_.lanes();
  const auto too_large = [&](LaneId lane) { return met_too_large_ && is_too_large(lanes[lane].cls); };
  const FairQueue::Round round{.skipped = [&](LaneId l) { return lanes[l].skipped_round == round_ || too_large(l); },
                               .closed = [&](LaneId l) { return lanes[l].closed_round == round_ || too_large(l); },
                               .missing = [&](LaneId lane) { return lanes[lane].missing_us; },
                               .max_lead_us = largest_us_ / 2};
  std::vector<ModelId> open(jobs_.models().size());
  std::iota(open.begin(), open.end(), 0);
  for (;;) {
    // The tenant with the least virtual time goes first across models too.
    std::optional<FairQueue::Candidate> best;
    const auto time = [&](const FairQueue::Candidate& c) {
      return queue_.tenants().virtual_time(queue_.at(c.handle).tenant);
    };
    std::erase_if(open, [&](ModelId m) {
      const int slots = fleet_.most_open_slots(m);
      if (!queue_.has_work(m, slots)) return true;
      const auto candidate = queue_.next(m, slots, now_us, round);
      if (candidate && (!best || time(*candidate) < time(*best))) best = candidate;
      return !candidate;
    });
    if (!best) return;
    place(*best, now_us);
  }
}

// Assigns the unit. If it should wait, or no worker can take it, skips its lane for the rest of this round.
void Scheduler::place(FairQueue::Candidate candidate, std::int64_t now_us) {
  auto& unit = jobs_.queued(candidate.handle);
  // Too late even for a short run. The reaper will end it as expired.
  if (is_late(unit.job, now_us)) return jobs_.put_aside(unit, Where::kDelayed, now_us);
  const bool must_go = candidate.aged || candidate.behind;
  auto& lane = jobs_.lanes()[unit.lane()];
  auto request = request_for(unit, now_us);
  request.lane_work_us = queue_.lane_work_us(unit.lane());
  request.may_wait = !must_go && skips_ < kMaxSkips;
  request.waited_us = now_us - unit.ready_us;
  const auto route = options_.routing->choose(fleet_, costs_, request, now_us);
  if (route.kind == Route::Kind::kAssign) return assign(unit, route, now_us);
  met_too_large_ |= is_too_large(lane.cls);
  lane.skipped_round = round_;
  lane.missing_us = route.missing_us;
  ++skips_;
  if (must_go || route.kind != Route::Kind::kWait) lane.closed_round = round_;
}

// May not wait, and has no work in its lane.
RouteRequest Scheduler::request_for(const Unit& unit, std::int64_t now_us) const {
  const Job& job = unit.job;
  const auto& lane = jobs_.lanes()[job.lane];
  return {.cls = job.cls,
          .model = job.model,
          .lane_hash = lane.hash,
          .prior_us = job.prior_us,
          .may_wait = false,
          .adapters = lane.adapters,
          .avoided = avoided(unit, now_us),
          .pixels = jobs_.needed_pixels(job.cls)};
}

// Names of workers that do not get the unit, because it failed there. Empty if no other ready worker could run it.
std::vector<std::string> Scheduler::avoided(const Unit& unit, std::int64_t now_us) const {
  std::vector<std::string> out;
  if (unit.failed_on.empty()) return out;
  bool another = false;
  for (const auto w : fleet_.with_model(unit.job.model)) {
    const auto& worker = fleet_.at(w);
    if (std::find(unit.failed_on.begin(), unit.failed_on.end(), worker.name) == unit.failed_on.end()) {
      another |= worker.state == WorkerState::kReady && jobs_.fits(unit.job, w);
    } else if (now_us - unit.ready_us < kAvoidUs || worker.failures >= kFailuresAvoided) {
      out.push_back(worker.name);
    }
  }
  return another ? out : std::vector<std::string>();
}

// Assigns units that run alone to empty workers. For others it keeps the worker that is free soonest from getting more
// units. Tenants go in the order of their virtual times, and a tenant's units in the order in which they became ready.
void Scheduler::place_alone(std::int64_t now_us) {
  fleet_.release_reserved();
  if (jobs_.alone().empty()) return;
  std::int64_t ready = 0, taken = 0;
  for (WorkerId w = 0; w < fleet_.id_bound(); ++w) {
    const auto& worker = fleet_.at(w);
    ready += worker.state == WorkerState::kReady;
    taken += !worker.held.empty() && worker.held.front().exclusive;
  }
  auto left = std::max<std::int64_t>(1, ready / kAloneShare) - taken;
  std::vector<Unit*> units(jobs_.alone().begin(), jobs_.alone().end());
  const auto order = [this](const Unit& unit) {
    return std::tuple(queue_.tenants().virtual_time(unit.job.tenant), unit.ready_us, unit.job.arrival, unit.index);
  };
  std::sort(units.begin(), units.end(), [&](const Unit* a, const Unit* b) { return order(*a) < order(*b); });
  for (auto* unit : units) {
    if (left <= 0) return;
    if (is_late(unit->job, now_us)) continue;  // the reaper will end it
    auto request = request_for(*unit, now_us);
    request.exclusive = true;
    const auto route = options_.routing->choose(fleet_, costs_, request, now_us);
    if (route.kind == Route::Kind::kAssign && request.allows(fleet_, route.worker)) {
      assign(*unit, route, now_us);
      --left;
      continue;
    }
    request.exclusive = false;
    std::optional<WorkerId> soonest;
    for (const auto w : fleet_.with_model(unit->job.model)) {
      const auto& worker = fleet_.at(w);
      if (worker.state != WorkerState::kReady || worker.reserved || worker.held.empty() ||
          worker.held.front().exclusive || !jobs_.fits(unit->job, w) || !request.allows(fleet_, w))
        continue;
      if (!soonest || fleet_.load(w).start_us(now_us) < fleet_.load(*soonest).start_us(now_us)) soonest = w;
    }
    if (!soonest) continue;
    fleet_.reserve(*soonest);
    --left;
  }
}

void Scheduler::assign(Unit& unit, const Route& route, std::int64_t now_us) {
  const auto dropped = jobs_.hold(unit, route, options_.new_nonce(), now_us);
  largest_us_ = std::max(unit.charged_us, largest_us_ - largest_us_ / 1024);
  const auto [at, fresh] = batches_.emplace(route.worker, pending_.assign.size());
  if (fresh) pending_.assign.push_back({.owner = fleet_.at(route.worker).owner, .units = {}});
  const auto names = [this](const std::vector<AdapterId>& ids) {
    std::vector<std::string> out;
    for (const auto a : ids) out.push_back(fleet_.adapters().name(a));
    return out;
  };
  pending_.assign[at->second].units.push_back({.ref = unit.ref(),
                                               .nonce = unit.nonce,
                                               .reason = route.reason,
                                               .drop_from_host = names(dropped.from_host),
                                               .drop_from_slots = names(dropped.from_slots)});
  if (options_.observer)
    options_.observer->assigned(queue_.tenants().name(unit.job.tenant), route.cold, now_us - unit.ready_us);
}

void Scheduler::request_revoke(const HeldUnit& held, bool lost, std::int64_t now_us) {
  auto* unit = jobs_.find_unit(held.ref);
  if (unit == nullptr || unit->where != Where::kHeld) return;
  if (unit->revoked_us > 0 && now_us - unit->revoked_us < kRevokeAgainUs) return;
  unit->revoked_us = now_us;
  (lost ? pending_.lost : pending_.revoke).push_back({held.ref, unit->nonce});
}

// Revokes the units that a worker has not started which is silent, draining, stuck, overdue, resting or gone. It keeps
// the started ones until their leases lapse. The grace is for workers that could not report: the registry forgets a
// worker a minute after its last heartbeat.
void Scheduler::revoke_from_absent(std::int64_t now_us) {
  for (WorkerId w = 0; w < fleet_.id_bound(); ++w) {
    const auto& worker = fleet_.at(w);
    if (worker.owner.empty() || !worker.returns_units(now_us)) continue;
    // A worker that left in good order has handed back its units and is no longer registered under any run id.
    const bool restarted = worker.state == WorkerState::kGone && fleet_.is_registered(worker.name);
    const bool absent = worker.state == WorkerState::kSilent || worker.state == WorkerState::kGone;
    if (absent && !restarted && now_us < grace_until_us_) continue;
    const bool lost = worker.state == WorkerState::kSilent || restarted;
    for (const auto& held : worker.held) {
      if (!held.started) request_revoke(held, lost, now_us);
    }
  }
}

// Moves a unit that waits behind another on a busy worker to an idle worker that no ready unit could use.
void Scheduler::revoke_for_idle(std::int64_t now_us) {
  const auto& lanes = jobs_.lanes();
  for (ModelId m = 0; m < jobs_.models().size(); ++m) {
    const auto could_use = [&](WorkerId w) {
      if (!queue_.has_work(m, fleet_.load(w).adapter_slots)) return false;
      const auto most = fleet_.room(m, w).max_pixels;
      for (LaneId l = 0; l < lanes.size(); ++l) {
        if (queue_.lane_work_us(l) > 0 && jobs_.class_at(lanes[l].cls).model == m &&
            jobs_.needed_pixels(lanes[l].cls) <= most)
          return true;
      }
      return false;
    };
    for (const auto idle : fleet_.with_model(m)) {
      const auto& taker = fleet_.at(idle);
      if (taker.state != WorkerState::kReady || !taker.held.empty() || !fleet_.load(idle).has_capacity() ||
          could_use(idle))
        continue;
      const HeldUnit* gain_unit = nullptr;
      std::int64_t most = kMoveGainUs;
      for (const auto w : fleet_.with_model(m)) {
        const auto& worker = fleet_.at(w);
        if (worker.held.size() < 2 || worker.held.back().started) continue;
        const auto& last = worker.held.back();
        const auto* unit = jobs_.find_unit(last.ref);
        if (unit == nullptr || unit->job.model != m) continue;
        // A clock that was set back makes it negative.
        if (const auto rests_us = now_us - unit->touched_us; rests_us >= 0 && rests_us < kMoveGainUs) continue;
        if (std::find(unit->failed_on.begin(), unit->failed_on.end(), taker.name) != unit->failed_on.end()) continue;
        const auto run = costs_.run_us(last.cls, m, idle, unit->job.prior_us);
        const auto cold = fleet_.is_warm(last.cls, idle) ? 0 : costs_.cold_us(m, run);
        const auto adapters = fleet_.adapters().scan(last.adapters, now_us);
        const auto room = fleet_.room(m, idle);
        if (!adapters.fits(idle) || jobs_.needed_pixels(last.cls) > room.max_pixels) continue;
        const auto need = adapters.at(idle);
        const auto there_us = std::max(now_us, need.ready_us) + room.load_us + cold + run;
        const auto gain = fleet_.load(w).start_us(now_us) - there_us - run / 4 - options_.routing->penalty_us(need);
        if (gain > most) {
          most = gain;
          gain_unit = &last;
        }
      }
      if (gain_unit != nullptr) request_revoke(*gain_unit, false, now_us);
      break;  // one at a time: the next call sees the result
    }
  }
}

}  // namespace ditfleet::scheduling
