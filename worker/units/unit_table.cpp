#include "worker/units/unit_table.h"

#include <algorithm>
#include <utility>

namespace ditfleet::worker {

UnitTable::UnitTable(int capacity, Timing timing) : capacity_(std::max(1, capacity)), timing_(timing) {}

UnitTable::Unit* UnitTable::find(const std::string& nonce) {
  const auto at = std::find_if(units_.begin(), units_.end(), [&](const Unit& u) { return u.attempt.nonce == nonce; });
  return at == units_.end() ? nullptr : &*at;
}

const UnitTable::Unit* UnitTable::find(const std::string& nonce) const {
  return const_cast<UnitTable*>(this)->find(nonce);
}

void UnitTable::request_stop(Unit& unit, StopReason reason) {
  if (reason > unit.stop) unit.stop = reason;
}

Action UnitTable::final_action(const Unit& unit) {
  switch (unit.stop) {
    case StopReason::kCanceled: return {Action::Kind::kReportCanceled, unit.attempt, unit.stop};
    // The queue may not have reaped the lease yet: handing the unit back spares the next worker the wait. If another
    // worker has the unit by now, the call reports that this worker has not crashed, and the queue forgives the lapse.
    case StopReason::kOrphaned:
    case StopReason::kLost:
    case StopReason::kPaused:
    case StopReason::kDrained:
    case StopReason::kNone: return {Action::Kind::kHandBack, unit.attempt, unit.stop};
    case StopReason::kRevoked: break;
  }
  return {Action::Kind::kForget, unit.attempt, unit.stop};
}

UnitTable::Admission UnitTable::assign(const queue::Attempt& attempt, Clock::time_point now, bool needs_adapters) {
  if (find(attempt.nonce)) return Admission::kDuplicate;
  const auto held = std::count_if(units_.begin(), units_.end(), [](const Unit& unit) {
    return unit.stage != Stage::kFinishing && unit.stop == StopReason::kNone;
  });
  if (draining_ || held >= capacity_) return Admission::kRefused;
  Unit unit;
  unit.attempt = attempt;
  unit.needs_adapters = needs_adapters;
  unit.orphan_at = now + timing_.orphan;
  units_.push_back(std::move(unit));
  return Admission::kAccepted;
}

void UnitTable::revoke(const std::string& nonce) {
  if (Unit* unit = find(nonce)) request_stop(*unit, StopReason::kRevoked);
}

void UnitTable::pause(const std::string& nonce) {
  if (Unit* unit = find(nonce)) request_stop(*unit, StopReason::kPaused);
}

void UnitTable::cancel(const std::string& nonce) {
  if (Unit* unit = find(nonce)) request_stop(*unit, StopReason::kCanceled);
}

void UnitTable::adapters_ready(const std::string& nonce) {
  if (Unit* unit = find(nonce)) unit->needs_adapters = false;
}

void UnitTable::encoded(const std::string& nonce) {
  if (encoding_ == nonce) encoding_.clear();
  if (Unit* unit = find(nonce); unit && unit->stage == Stage::kEncoding) unit->stage = Stage::kPrepared;
}

void UnitTable::started(const std::string& nonce, Clock::time_point now) {
  Unit* unit = find(nonce);
  if (!unit || unit->stage != Stage::kStarting) return;
  unit->confirmed = true;
  unit->orphan_at = std::max(unit->orphan_at, now + timing_.orphan);
}

void UnitTable::start_refused(const std::string& nonce) {
  if (Unit* unit = find(nonce)) {
    unit->has_stopped = true;
    request_stop(*unit, StopReason::kLost);
  }
}

void UnitTable::stepped(const std::string& nonce, int step, int total) {
  Unit* unit = find(nonce);
  if (!unit || step <= unit->step) return;
  unit->step = step;
  unit->total = total;
  unit->step_pending = true;
}

void UnitTable::denoised(const std::string& nonce) {
  if (Unit* unit = find(nonce)) unit->stage = Stage::kFinishing;
}

void UnitTable::stopped(const std::string& nonce) {
  if (Unit* unit = find(nonce)) unit->has_stopped = true;
}

void UnitTable::ended(const std::string& nonce) {
  std::erase_if(units_, [&](const Unit& unit) { return unit.attempt.nonce == nonce; });
}

void UnitTable::drain() {
  draining_ = true;
  for (Unit& unit : units_) {
    if (unit.stage < Stage::kStarting) request_stop(unit, StopReason::kDrained);
  }
}

void UnitTable::resume() { draining_ = false; }

void UnitTable::drain_running() {
  for (Unit& unit : units_) {
    if (unit.stage != Stage::kFinishing) request_stop(unit, StopReason::kDrained);
  }
}

// Each step is reported once: a renewal without a new step carries 0.
queue::Renewal UnitTable::renewal_of(Unit& unit) {
  const bool report = std::exchange(unit.step_pending, false);
  return {unit.attempt, report ? unit.step : 0, report ? unit.total : 0};
}

std::optional<queue::Renewal> UnitTable::take_pending_step(const std::string& nonce) {
  Unit* unit = find(nonce);
  if (!unit || !unit->step_pending) return std::nullopt;
  return renewal_of(*unit);
}

std::vector<queue::Renewal> UnitTable::due_renewals(Clock::time_point now) {
  std::vector<queue::Renewal> renewals;
  if (renewing_ || units_.empty()) return renewals;
  const bool step_due = now >= last_renewal_ + timing_.step &&
                        std::any_of(units_.begin(), units_.end(), [](const Unit& u) { return u.step_pending; });
  if (now < retry_at_ || (!step_due && now < last_renewal_ + timing_.renew)) return renewals;
  for (Unit& unit : units_) {
    if (unit.stop >= StopReason::kOrphaned) continue;
    renewals.push_back(renewal_of(unit));
  }
  last_renewal_ = now;
  renewing_ = !renewals.empty();
  return renewals;
}

void UnitTable::renewed(const std::vector<queue::Renewal>& renewals, const std::vector<queue::RenewOutcome>& outcomes,
                        Clock::time_point sent) {
  renewing_ = false;
  for (std::size_t i = 0; i < renewals.size() && i < outcomes.size(); ++i) {
    Unit* unit = find(renewals[i].attempt.nonce);
    if (!unit) continue;
    if (outcomes[i] == queue::RenewOutcome::kLost) {
      request_stop(*unit, StopReason::kLost);
      continue;
    }
    unit->orphan_at = std::max(unit->orphan_at, sent + timing_.orphan);
    if (outcomes[i] == queue::RenewOutcome::kCancelRequested) request_stop(*unit, StopReason::kCanceled);
  }
}

void UnitTable::renewal_failed(const std::vector<queue::Renewal>& renewals, Clock::time_point now) {
  renewing_ = false;
  retry_at_ = now + timing_.retry;
  for (const auto& renewal : renewals) {
    if (Unit* unit = find(renewal.attempt.nonce); unit && renewal.step > 0) unit->step_pending = true;
  }
}

bool UnitTable::may_complete(const std::string& nonce, Clock::time_point now) const {
  const Unit* unit = find(nonce);
  return unit && unit->stop != StopReason::kLost && unit->stop != StopReason::kOrphaned && now < unit->orphan_at;
}

StopReason UnitTable::stop_reason(const std::string& nonce) const {
  const Unit* unit = find(nonce);
  return unit ? unit->stop : StopReason::kLost;
}

Clock::time_point UnitTable::next_wakeup() const {
  auto at = Clock::time_point::max();
  bool step_pending = false;
  for (const Unit& unit : units_) {
    step_pending |= unit.step_pending;
    if (unit.stop < StopReason::kOrphaned) at = std::min(at, unit.orphan_at);
  }
  if (!units_.empty() && !renewing_) {
    at = std::min(at, std::max(retry_at_, last_renewal_ + (step_pending ? timing_.step : timing_.renew)));
  }
  return at;
}

std::vector<Action> UnitTable::decide(Clock::time_point now) {
  std::vector<Action> actions;
  for (Unit& unit : units_) {
    if (unit.orphan_at <= now) request_stop(unit, StopReason::kOrphaned);
  }
  std::erase_if(units_, [&](Unit& unit) {
    if (unit.stop == StopReason::kNone) return false;
    const bool answered = unit.stage == Stage::kStarting && unit.confirmed;
    if (unit.stage < Stage::kStarting || answered || unit.has_stopped) {
      actions.push_back(final_action(unit));
      return true;
    }
    if (unit.stage == Stage::kDenoising && !unit.stop_requested) {
      unit.stop_requested = true;
      actions.push_back({Action::Kind::kStopDenoising, unit.attempt, unit.stop});
    }
    return false;
  });
  for (Unit& unit : units_) {
    if (unit.stage == Stage::kStarting && unit.confirmed) {
      unit.stage = Stage::kDenoising;
      actions.push_back({Action::Kind::kDenoise, unit.attempt});
    }
  }
  const bool device_busy = std::any_of(units_.begin(), units_.end(), [](const Unit& u) {
    return u.stage == Stage::kStarting || u.stage == Stage::kDenoising;
  });
  if (!device_busy) {
    const auto next =
        std::find_if(units_.begin(), units_.end(), [](const Unit& u) { return u.stage == Stage::kPrepared; });
    if (next != units_.end()) {
      next->stage = Stage::kStarting;
      actions.push_back({Action::Kind::kStart, next->attempt});
    }
  }
  if (encoding_.empty()) {
    const auto next = std::find_if(units_.begin(), units_.end(),
                                   [](const Unit& u) { return u.stage == Stage::kAssigned && !u.needs_adapters; });
    if (next != units_.end()) {
      encoding_ = next->attempt.nonce;
      next->stage = Stage::kEncoding;
      actions.push_back({Action::Kind::kEncodeText, next->attempt});
    }
  }
  return actions;
}

std::vector<queue::UnitRef> UnitTable::refs() const {
  std::vector<queue::UnitRef> refs;
  for (const Unit& unit : units_) refs.push_back(unit.attempt.ref);
  return refs;
}

std::vector<queue::Attempt> UnitTable::attempts() const {
  std::vector<queue::Attempt> attempts;
  for (const Unit& unit : units_) attempts.push_back(unit.attempt);
  return attempts;
}

}  // namespace ditfleet::worker
