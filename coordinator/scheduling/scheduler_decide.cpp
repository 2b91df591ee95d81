// Scheduler: assigning and revoking units.
#include <algorithm>
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
  Actions actions = std::exchange(pending_, {});
  pending_bytes_ = 0;
  assign_ready(actions, now_us);
  return actions;
}

void Scheduler::assign_ready(Actions& actions, std::int64_t now_us) {
  Batches batches;
  place_alone(now_us, batches, actions);
  if (queue_.size() == 0) return;
  ++round_;
  std::vector<ModelId> open;
  for (ModelId m = 0; m < models_.size(); ++m) {
    if (queue_.has_work(m, fleet_.most_open_slots(m))) open.push_back(m);
  }
  skips_ = 0;
  met_too_large_ = false;
  const auto too_large = [this](LaneId lane) { return met_too_large_ && is_too_large(lanes_[lane].cls); };
  const FairQueue::Round round{.skipped = [&](LaneId l) { return lanes_[l].skipped_round == round_ || too_large(l); },
                               .closed = [&](LaneId l) { return lanes_[l].closed_round == round_ || too_large(l); },
                               .missing = [this](LaneId lane) { return lanes_[lane].missing_us; },
                               .max_lead_us = largest_us_ / 2};
  while (!open.empty()) {
    // The tenant with the least virtual time goes first across models too.
    std::size_t chosen = 0;
    std::optional<FairQueue::Candidate> best;
    for (std::size_t i = 0; i < open.size();) {
      const auto candidate = queue_.next(open[i], fleet_.most_open_slots(open[i]), now_us, round);
      if (!candidate) {
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
        continue;
      }
      const auto time = [&](const FairQueue::Candidate& c) {
        return queue_.tenants().virtual_time(queue_.at(c.handle).tenant);
      };
      if (!best || time(*candidate) < time(*best)) {
        best = candidate;
        chosen = i;
      }
      ++i;
    }
    if (!best) break;
    place(*best, now_us, batches, actions);
    if (fleet_.most_open_slots(open[chosen]) < 0) open.erase(open.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
}

// Assigns the unit. If it should wait, or no worker can take it, skips its lane for the rest of this round.
void Scheduler::place(FairQueue::Candidate candidate, std::int64_t now_us, Batches& batches, Actions& actions) {
  const auto& queued = queue_.at(candidate.handle);
  const auto& [job, index] = queued_[candidate.handle];
  if (is_late(*job, now_us)) {
    // Too late even for a short run. The reaper will end it as expired.
    queue_.remove(candidate.handle);
    job->units[static_cast<std::size_t>(index)].where = Unit::Where::kDelayed;
    return;
  }
  const bool must_go = candidate.aged || candidate.behind;
  auto& lane = lanes_[queued.lane];
  const auto names = avoided(*job, job->units[static_cast<std::size_t>(index)], now_us);
  const RouteRequest request{.cls = lane.cls,
                             .model = queued.model,
                             .lane_hash = lane.hash,
                             .prior_us = queued.prior_us,
                             .lane_work_us = queue_.lane_work_us(queued.lane),
                             .may_wait = !must_go && skips_ < kMaxSkips,
                             .adapters = lane.adapters,
                             .waited_us = now_us - queued.ready_us,
                             .avoided = names,
                             .pixels = needed_pixels(lane.cls)};
  const auto route = options_.routing->choose(fleet_, costs_, request, now_us);
  if (route.kind == Route::Kind::kAssign) {
    queue_.remove(candidate.handle);
    return assign(*job, index, route, now_us, batches, actions);
  }
  met_too_large_ |= is_too_large(lane.cls);
  lane.skipped_round = round_;
  lane.missing_us = route.missing_us;
  ++skips_;
  if (must_go || route.kind != Route::Kind::kWait) lane.closed_round = round_;
}

// Names of workers that do not get the unit, because it failed there. Empty if no other ready worker could run it.
std::vector<std::string> Scheduler::avoided(const Job& job, const Unit& unit, std::int64_t now_us) const {
  std::vector<std::string> out;
  if (unit.failed_on.empty()) return out;
  bool another = false;
  for (const auto w : fleet_.with_model(job.model)) {
    const auto& worker = fleet_.at(w);
    if (std::find(unit.failed_on.begin(), unit.failed_on.end(), worker.name) == unit.failed_on.end()) {
      another |= worker.state == WorkerState::kReady && fleet_.has_room(job.model, w, needed_pixels(job.cls)) &&
                 fleet_.adapters().slots(w) >= static_cast<int>(lanes_[job.lane].adapters.size());
    } else if (now_us - unit.ready_us < kAvoidUs || worker.failures >= kFailuresAvoided) {
      out.push_back(worker.name);
    }
  }
  return another ? out : std::vector<std::string>();
}

// Assigns units that run alone to empty workers. For others it keeps the worker that is free soonest from getting more
// units. Tenants go in the order of their virtual times, and a tenant's units in the order in which they became ready.
void Scheduler::place_alone(std::int64_t now_us, Batches& batches, Actions& actions) {
  fleet_.release_reserved();
  if (alone_.empty()) return;
  std::int64_t ready = 0, taken = 0;
  for (WorkerId w = 0; w < fleet_.id_bound(); ++w) {
    const auto& worker = fleet_.at(w);
    ready += worker.state == WorkerState::kReady;
    taken += !worker.held.empty() && worker.held.front().exclusive;
  }
  auto left = std::max<std::int64_t>(1, ready / kAloneShare) - taken;
  std::vector<std::pair<Job*, int>> units(alone_.begin(), alone_.end());
  const auto order = [this](const std::pair<Job*, int>& at) {
    const auto& [job, index] = at;
    return std::make_tuple(queue_.tenants().virtual_time(job->tenant), job->units[index].ready_us, job->arrival, index);
  };
  std::sort(units.begin(), units.end(), [&](const auto& a, const auto& b) { return order(a) < order(b); });
  for (const auto& [job, index] : units) {
    if (left <= 0) return;
    if (is_late(*job, now_us)) continue;  // the reaper will end it
    const auto& lane = lanes_[job->lane];
    const auto names = avoided(*job, job->units[index], now_us);
    RouteRequest request{.cls = job->cls,
                         .model = job->model,
                         .lane_hash = lane.hash,
                         .prior_us = job->prior_us,
                         .may_wait = false,
                         .adapters = lane.adapters,
                         .exclusive = true,
                         .avoided = names,
                         .pixels = needed_pixels(job->cls)};
    const auto route = options_.routing->choose(fleet_, costs_, request, now_us);
    if (route.kind == Route::Kind::kAssign && request.allows(fleet_, route.worker)) {
      alone_.erase({job, index});
      assign(*job, index, route, now_us, batches, actions);
      --left;
      continue;
    }
    std::optional<WorkerId> soonest;
    for (const auto w : fleet_.with_model(job->model)) {
      const auto& worker = fleet_.at(w);
      if (worker.state != WorkerState::kReady || worker.reserved || worker.held.empty() ||
          worker.held.front().exclusive || fleet_.adapters().slots(w) < static_cast<int>(lane.adapters.size()) ||
          !fleet_.has_room(job->model, w, request.pixels) ||
          std::find(names.begin(), names.end(), worker.name) != names.end())
        continue;
      if (!soonest || fleet_.load(w).start_us(now_us) < fleet_.load(*soonest).start_us(now_us)) soonest = w;
    }
    if (!soonest) continue;
    fleet_.reserve(*soonest);
    --left;
  }
}

void Scheduler::assign(Job& job, int index, const Route& route, std::int64_t now_us, Batches& batches,
                       Actions& actions) {
  const auto dropped = hold(job, index, route, options_.new_nonce(), now_us);
  const auto& unit = job.units[static_cast<std::size_t>(index)];
  largest_us_ = std::max(unit.charged_us, largest_us_ - largest_us_ / 1024);
  const auto [at, fresh] = batches.emplace(route.worker, actions.assign.size());
  if (fresh) actions.assign.push_back({.owner = fleet_.at(route.worker).owner, .units = {}});
  const auto names = [this](const std::vector<AdapterId>& ids) {
    std::vector<std::string> out;
    for (const auto a : ids) out.push_back(fleet_.adapters().name(a));
    return out;
  };
  actions.assign[at->second].units.push_back({.ref = {job.id, index},
                                              .nonce = unit.nonce,
                                              .reason = route.reason,
                                              .drop_from_host = names(dropped.from_host),
                                              .drop_from_slots = names(dropped.from_slots)});
  if (options_.observer)
    options_.observer->assigned(queue_.tenants().name(job.tenant), route.cold, now_us - unit.ready_us);
}

void Scheduler::request_revoke(const HeldUnit& held, bool lost, std::int64_t now_us) {
  Job* job = nullptr;
  auto* unit = find_unit(held.ref, &job);
  if (unit == nullptr || unit->where != Unit::Where::kHeld) return;
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
  for (ModelId m = 0; m < models_.size(); ++m) {
    std::int64_t least_pixels = 0;  // of the waiting units
    if (!fleet_.rooms(m).empty()) {
      least_pixels = ModelRoom::kUnlimited;
      for (LaneId l = 0; l < lanes_.size(); ++l) {
        if (queue_.lane_work_us(l) > 0 && classes_[lanes_[l].cls].model == m)
          least_pixels = std::min(least_pixels, needed_pixels(lanes_[l].cls));
      }
    }
    for (const auto idle : fleet_.with_model(m)) {
      const auto& taker = fleet_.at(idle);
      if (taker.state != WorkerState::kReady || !taker.held.empty() || !fleet_.load(idle).has_capacity() ||
          (queue_.has_work(m, fleet_.load(idle).adapter_slots) && fleet_.has_room(m, idle, least_pixels)))
        continue;
      const HeldUnit* gain_unit = nullptr;
      std::int64_t most = kMoveGainUs;
      for (const auto w : fleet_.with_model(m)) {
        const auto& worker = fleet_.at(w);
        if (worker.held.size() < 2 || worker.held.back().started) continue;
        const auto& last = worker.held.back();
        const auto* job = find_job(last.ref.job);
        if (job == nullptr || job->model != m) continue;
        const auto& unit = job->units[last.ref.unit];
        if (now_us - unit.touched_us < kMoveGainUs) continue;
        if (std::find(unit.failed_on.begin(), unit.failed_on.end(), taker.name) != unit.failed_on.end()) continue;
        const auto run = costs_.run_us(last.cls, m, idle, job->prior_us);
        const auto cold = fleet_.is_warm(last.cls, idle) ? 0 : costs_.cold_us(m, run);
        const auto adapters = fleet_.adapters().scan(last.adapters, now_us);
        if (!adapters.fits(idle) || !fleet_.has_room(m, idle, needed_pixels(last.cls))) continue;
        const auto need = adapters.at(idle);
        const auto rooms = fleet_.rooms(m);
        const auto load = idle < rooms.size() ? rooms[idle].load_us : 0;
        const auto there_us = std::max(now_us, need.ready_us) + load + cold + run;
        const auto gain = fleet_.load(w).start_us(now_us) - there_us - run / 4 - options_.routing->penalty_us(need);
        if (gain > most) {
          most = gain;
          gain_unit = &last;
        }
      }
      if (gain_unit == nullptr) break;
      request_revoke(*gain_unit, false, now_us);
      break;  // one at a time: the next call sees the result
    }
  }
}

}  // namespace ditfleet::scheduling
