// The outputs of Scheduler: who gets which unit, and what is taken back.
#include <algorithm>

#include "coordinator/scheduling/placement/router.h"
#include "coordinator/scheduling/scheduler.h"

namespace ditfleet::scheduling {
namespace {

constexpr std::int64_t kRevokeAgainUs = 1'000'000;
// Moving a unit to an idle worker throws away what its holder has prepared: it must be worth that.
constexpr std::int64_t kMoveGainUs = 200'000;
// Lanes that may be told to wait for a holder in one round: what is behind them waits for none, so that affinity bends
// the fair order no further.
constexpr int kMostSkips = 16;
// Lanes behind a unit that are looked at for one that may pass it.
constexpr int kMostPassed = 64;
// Assigned units of which one may yield, and how many that did not may do so later: those that are late come in bursts.
constexpr double kYieldPart = 0.05, kMostYields = 10;

}  // namespace

Actions Scheduler::decide(std::int64_t now_us) {
  Actions actions = std::exchange(pending_, {});
  dispatch(actions, now_us);
  return actions;
}

void Scheduler::dispatch(Actions& actions, std::int64_t now_us) {
  if (queue_.size() == 0) return;
  ++round_;
  std::vector<ModelId> open;
  for (ModelId m = 0; m < models_.size(); ++m) {
    if (queue_.has_work(m, fleet_.widest_place(m))) open.push_back(m);
  }
  skips_ = 0;
  options_.routing->begin_round();
  const FairQueue::Round round{.skipped = [this](LaneId lane) { return lanes_[lane].skipped_round == round_; },
                               .closed = [this](LaneId lane) { return lanes_[lane].closed_round == round_; },
                               .lack = [this](LaneId lane) { return lanes_[lane].lacks_us; },
                               .lead_us = largest_us_ / 2};
  Batches batches;
  while (!open.empty()) {
    // Across models, too, the tenant with the least virtual time comes first.
    std::size_t chosen = 0;
    std::optional<FairQueue::Candidate> best;
    for (std::size_t i = 0; i < open.size();) {
      const auto candidate = queue_.next(open[i], fleet_.widest_place(open[i]), now_us, round);
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
    if (fleet_.widest_place(open[chosen]) < 0) open.erase(open.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
}

Route Scheduler::route(const QueuedUnit& queued, bool may_wait, std::int64_t now_us) {
  const auto& lane = lanes_[queued.lane];
  return options_.routing->choose(fleet_, costs_,
                                  {.cls = lane.cls,
                                   .model = queued.model,
                                   .class_hash = lane.hash,
                                   .prior_us = queued.prior_us,
                                   .lane_work_us = queue_.lane_work_us(queued.lane),
                                   .may_wait = may_wait,
                                   .adapters = lane.adapters,
                                   .waited_us = now_us - queued.ready_us,
                                   .tail_us = tail_us(queued.model)},
                                  now_us);
}

std::optional<FairQueue::Handle> Scheduler::pass(FairQueue::Handle handle, WorkerId to, std::int64_t now_us) const {
  const auto& queued = queue_.at(handle);
  const auto within_us = options_.routing->reach_us(queued.cost_us, now_us - queued.due_us, tail_us(queued.model));
  if (within_us <= 0) return std::nullopt;
  return queue_.find_behind(handle, fleet_.load(to).slots, within_us, kMostPassed, [&](const QueuedUnit& unit) {
    const auto& lane = lanes_[unit.lane];
    return fleet_.is_warm(lane.cls, to) && fleet_.adapters().has(to, lane.adapters);
  });
}

// Assigns the unit, or one that may pass it, or, if its lane is better off waiting, skips the lane for the rest of this
// round.
void Scheduler::place(FairQueue::Candidate candidate, std::int64_t now_us, Batches& batches, Actions& actions) {
  const auto& queued = queue_.at(candidate.handle);
  const auto& [job, index] = queued_[candidate.handle];
  if (job->deadline_us > 0 && job->deadline_us <= now_us) {
    // Too late even for a short run: it waits for the reaper, whose `expired` ends it.
    queue_.remove(candidate.handle);
    job->units[static_cast<std::size_t>(index)].where = Unit::Where::kDelayed;
    return;
  }
  const bool free = !candidate.aged && !candidate.behind;  // its turn is no matter of age or of its tenant's share
  if (options_.late_units_yield && free && !queued.yielded && yields_ >= 1) {
    const auto later_us = options_.routing->yield_us(queued.cost_us, now_us - queued.ready_us, tail_us(queued.model));
    if (later_us > 0) {
      yields_ -= 1;
      queue_.postpone(candidate.handle, queued.due_us + later_us);
      return;
    }
  }
  const auto chosen = route(queued, free && skips_ < kMostSkips, now_us);
  if (chosen.kind != Route::Kind::kAssign) {
    auto& lane = lanes_[queued.lane];
    lane.skipped_round = round_;
    lane.lacks_us = chosen.lacks_us;
    ++skips_;
    // It was to go now and nobody took it, so nobody waits for its sake.
    if (!free || chosen.kind != Route::Kind::kWait) lane.closed_round = round_;
    return;
  }
  if (free && chosen.need.load_us > 0) {
    if (const auto other = pass(candidate.handle, chosen.worker, now_us)) {
      const auto instead = route(queue_.at(*other), true, now_us);
      if (instead.kind == Route::Kind::kAssign && instead.need.load_us == 0)
        return assign(*other, instead, now_us, batches, actions);
    }
  }
  assign(candidate.handle, chosen, now_us, batches, actions);
}

void Scheduler::assign(FairQueue::Handle handle, const Route& route, std::int64_t now_us, Batches& batches,
                       Actions& actions) {
  const auto& [job, index] = queued_[handle];
  const auto& lane = lanes_[queue_.at(handle).lane];
  auto& unit = job->units[static_cast<std::size_t>(index)];
  const queue::UnitRef ref{job->id, index};
  queue_.remove(handle);
  unit.where = Unit::Where::kHeld;
  unit.worker = route.worker;
  unit.nonce = options_.new_nonce();
  unit.touched_us = now_us;
  charge(*job, unit, route.cold);
  largest_us_ = std::max(unit.charged_us, largest_us_ - largest_us_ / 1024);  // of late
  yields_ = std::min(kMostYields, yields_ + kYieldPart);
  auto dropped = fleet_.adapters().hold(route.worker, lane.adapters, options_.routing->eviction(), now_us);
  fleet_.hold(route.worker, {.ref = ref,
                             .cls = job->cls,
                             .run_us = route.run_us + route.cold_us,
                             .assigned_us = now_us,
                             .cold = route.cold,
                             .adapters = lane.adapters,
                             .ready_us = route.need.ready_us});
  const auto [at, fresh] = batches.emplace(route.worker, actions.assign.size());
  if (fresh) actions.assign.push_back({.owner = fleet_.at(route.worker).owner, .units = {}});
  const auto names = [this](const std::vector<AdapterId>& ids) {
    std::vector<std::string> out;
    for (const auto a : ids) out.push_back(fleet_.adapters().name(a));
    return out;
  };
  actions.assign[at->second].units.push_back({.ref = ref,
                                              .nonce = unit.nonce,
                                              .reason = route.reason,
                                              .drop_from_host = names(dropped.from_host),
                                              .drop_from_slots = names(dropped.from_slots)});
  if (observer_ != nullptr) observer_->assigned(route.cold, now_us - unit.ready_us);
}

void Scheduler::ask_revoke(const HeldUnit& held, std::int64_t now_us) {
  Job* job = nullptr;
  auto* unit = find_unit(held.ref, &job);
  if (unit == nullptr || unit->where != Unit::Where::kHeld) return;
  if (unit->revoked_us > 0 && now_us - unit->revoked_us < kRevokeAgainUs) return;
  unit->revoked_us = now_us;
  pending_.revoke.push_back({held.ref, unit->nonce});
  if (observer_ != nullptr) observer_->revoked();
}

// What was assigned to a worker that is silent, draining or gone, and not started, goes to another. What it
// had started is its own until its lease lapses. The grace is for the silent alone: the registry keeps a worker for a
// minute after its last heartbeat, so one that is not there has deregistered, or was away for longer than anybody
// waits.
void Scheduler::revoke_from_absent(std::int64_t now_us) {
  for (WorkerId w = 0; w < fleet_.slots(); ++w) {
    const auto& worker = fleet_.at(w);
    if (worker.owner.empty() || worker.standing == Standing::kReady || worker.standing == Standing::kStarting) continue;
    if (worker.standing == Standing::kSilent && now_us < grace_until_us_) continue;
    for (const auto& held : worker.held) {
      if (!held.started) ask_revoke(held, now_us);
    }
  }
}

// An idle worker and nothing ready to give it, while a unit waits behind another on a busy one.
void Scheduler::revoke_for_idle(std::int64_t now_us) {
  for (ModelId m = 0; m < models_.size(); ++m) {
    for (const auto idle : fleet_.with_model(m)) {
      const auto& taker = fleet_.at(idle);
      if (taker.standing != Standing::kReady || !taker.held.empty() || queue_.has_work(m, fleet_.load(idle).slots))
        continue;
      const HeldUnit* gain_unit = nullptr;
      std::int64_t most = kMoveGainUs;
      for (const auto w : fleet_.with_model(m)) {
        const auto& worker = fleet_.at(w);
        if (worker.held.size() < 2 || worker.held.back().started) continue;
        const auto& last = worker.held.back();
        const auto* job = find_job(last.ref.job);
        if (job == nullptr || job->model != m) continue;
        if (const auto& unit = job->units[last.ref.unit]; now_us - unit.touched_us < kMoveGainUs) continue;
        const auto run = costs_.run_us(last.cls, m, idle, job->prior_us);
        const auto cold = fleet_.is_warm(last.cls, idle) ? 0 : costs_.cold_us(m, run);
        const auto adapters = fleet_.adapters().scan(last.adapters, now_us);
        if (!adapters.fits(idle)) continue;
        const auto need = adapters.at(idle);
        const auto there_us = std::max(now_us, need.ready_us) + cold + run;
        const auto gain = worker.start_us(now_us) - there_us - run / 4 - options_.routing->bias_us(need);
        if (gain > most) {
          most = gain;
          gain_unit = &last;
        }
      }
      if (gain_unit == nullptr) break;
      ask_revoke(*gain_unit, now_us);
      break;  // one a time: the next look sees what came of it
    }
  }
}

}  // namespace ditfleet::scheduling
