#include "worker/units/holdings.h"

#include <algorithm>
#include <utility>

namespace ditfleet::worker {
namespace {

// Of two reasons to stop the one that leaves less to do with the queue wins: what is lost is not ours to
// report on.
int rank(Stop stop) {
  switch (stop) {
    case Stop::kNone: return 0;
    case Stop::kDrained: return 1;
    case Stop::kCanceled: return 2;
    case Stop::kLapsed: return 3;
    case Stop::kRevoked: return 4;
    case Stop::kLost: return 5;
  }
  return 0;
}

}  // namespace

Holdings::Holdings(int capacity, Timing timing) : capacity_(std::max(1, capacity)), timing_(timing) {}

Holdings::Unit* Holdings::find(const std::string& nonce) {
  const auto at = std::find_if(units_.begin(), units_.end(), [&](const Unit& u) { return u.attempt.nonce == nonce; });
  return at == units_.end() ? nullptr : &*at;
}

const Holdings::Unit* Holdings::find(const std::string& nonce) const {
  return const_cast<Holdings*>(this)->find(nonce);
}

void Holdings::erase(const std::string& nonce) {
  std::erase_if(units_, [&](const Unit& unit) { return unit.attempt.nonce == nonce; });
}

void Holdings::request_stop(Unit& unit, Stop why) {
  if (rank(why) > rank(unit.stop)) unit.stop = why;
}

Action Holdings::settle(const Unit& unit) {
  switch (unit.stop) {
    case Stop::kCanceled: return {Action::Kind::kReportCanceled, unit.attempt, unit.stop};
    // A lapsed lease may still be ours in Redis, where nobody reaped it: handing it back spares the next
    // worker the wait. If it is not ours any more, the queue refuses.
    case Stop::kLapsed:
    case Stop::kDrained:
    case Stop::kNone: return {Action::Kind::kHandBack, unit.attempt, unit.stop};
    case Stop::kRevoked:
    case Stop::kLost: break;
  }
  return {Action::Kind::kForget, unit.attempt, unit.stop};
}

bool Holdings::device_busy() const {
  return std::any_of(units_.begin(), units_.end(),
                     [](const Unit& u) { return u.stage == Stage::kStarting || u.stage == Stage::kDenoising; });
}

Holdings::Admitted Holdings::assign(const queue::Attempt& attempt, Clock::time_point now, bool waits) {
  if (find(attempt.nonce)) return Admitted::kDuplicate;
  const auto held = std::count_if(units_.begin(), units_.end(), [](const Unit& unit) {
    return unit.stage != Stage::kFinishing && unit.stop == Stop::kNone;
  });
  if (draining_ || held >= capacity_) return Admitted::kRefused;
  Unit unit;
  unit.attempt = attempt;
  unit.waits = waits;
  // Too long by the message's time on the way. That does no harm: before it starts only its text is
  // encoded, and start() is answered by Redis and begins a lease that is counted rightly.
  unit.lease_until = now + timing_.lease;
  units_.push_back(std::move(unit));
  return Admitted::kTaken;
}

void Holdings::revoke(const std::string& nonce) {
  if (Unit* unit = find(nonce)) request_stop(*unit, Stop::kRevoked);
}

void Holdings::cancel(const std::string& nonce) {
  if (Unit* unit = find(nonce)) request_stop(*unit, Stop::kCanceled);
}

void Holdings::adapters_there(const std::string& nonce) {
  if (Unit* unit = find(nonce)) unit->waits = false;
}

void Holdings::encoded(const std::string& nonce) {
  text_busy_ = false;
  if (Unit* unit = find(nonce); unit && unit->stage == Stage::kEncoding) unit->stage = Stage::kPrepared;
}

void Holdings::started(const std::string& nonce, Clock::time_point sent) {
  Unit* unit = find(nonce);
  if (!unit || unit->stage != Stage::kStarting) return;
  unit->confirmed = true;
  unit->lease_until = std::max(unit->lease_until, sent + timing_.lease);
}

void Holdings::start_refused(const std::string& nonce) {
  if (Unit* unit = find(nonce)) {
    unit->has_stopped = true;
    request_stop(*unit, Stop::kLost);
  }
}

void Holdings::stepped(const std::string& nonce, int step, int total) {
  Unit* unit = find(nonce);
  if (!unit || step <= unit->step) return;
  unit->step = step;
  unit->total = total;
  unit->step_pending = true;
}

void Holdings::denoised(const std::string& nonce) {
  if (Unit* unit = find(nonce)) unit->stage = Stage::kFinishing;
}

void Holdings::stopped(const std::string& nonce) {
  if (Unit* unit = find(nonce)) {
    unit->has_stopped = true;
    // Asked by none here: the device thread itself saw the lease run out.
    if (unit->stop == Stop::kNone) unit->stop = Stop::kLapsed;
  }
}

void Holdings::failed(const std::string& nonce) { erase(nonce); }

void Holdings::ended(const std::string& nonce) { erase(nonce); }

void Holdings::drain() {
  draining_ = true;
  for (Unit& unit : units_) {
    if (unit.stage < Stage::kDenoising) request_stop(unit, Stop::kDrained);
  }
}

void Holdings::drain_running() {
  for (Unit& unit : units_) {
    if (unit.stage != Stage::kFinishing) request_stop(unit, Stop::kDrained);
  }
}

// A step is told once: a renewal without a new one carries 0.
queue::Renewal Holdings::renewal_of(Unit& unit) {
  const bool tell = std::exchange(unit.step_pending, false);
  return {unit.attempt, tell ? unit.step : 0, tell ? unit.total : 0};
}

std::optional<queue::Renewal> Holdings::take_pending_step(const std::string& nonce) {
  Unit* unit = find(nonce);
  if (!unit || !unit->step_pending) return std::nullopt;
  return renewal_of(*unit);
}

std::vector<queue::Renewal> Holdings::due_renewals(Clock::time_point now) {
  std::vector<queue::Renewal> renewals;
  if (renewing_ || units_.empty()) return renewals;
  const bool step_due = now >= last_renewal_ + timing_.step &&
                        std::any_of(units_.begin(), units_.end(), [](const Unit& u) { return u.step_pending; });
  if (now < retry_at_ || (!step_due && now < last_renewal_ + timing_.renew)) return renewals;
  for (Unit& unit : units_) {
    if (rank(unit.stop) >= rank(Stop::kLapsed)) continue;
    renewals.push_back(renewal_of(unit));
  }
  last_renewal_ = now;
  renewing_ = !renewals.empty();
  return renewals;
}

void Holdings::renewed(const std::vector<queue::Renewal>& renewals, const std::vector<queue::RenewOutcome>& outcomes,
                       Clock::time_point sent) {
  renewing_ = false;
  for (std::size_t i = 0; i < renewals.size() && i < outcomes.size(); ++i) {
    Unit* unit = find(renewals[i].attempt.nonce);
    if (!unit) continue;
    if (outcomes[i] == queue::RenewOutcome::kLost) {
      request_stop(*unit, Stop::kLost);
      continue;
    }
    unit->lease_until = std::max(unit->lease_until, sent + timing_.lease);
    if (outcomes[i] == queue::RenewOutcome::kCancelRequested) request_stop(*unit, Stop::kCanceled);
  }
}

void Holdings::renewal_failed(const std::vector<queue::Renewal>& renewals, Clock::time_point now) {
  renewing_ = false;
  retry_at_ = now + timing_.retry;
  for (const auto& renewal : renewals) {
    if (Unit* unit = find(renewal.attempt.nonce); unit && renewal.step > 0) unit->step_pending = true;
  }
}

bool Holdings::may_complete(const std::string& nonce, Clock::time_point now) const {
  const Unit* unit = find(nonce);
  return unit && unit->stop != Stop::kLost && unit->stop != Stop::kLapsed && now < unit->lease_until;
}

Clock::time_point Holdings::lease_until(const std::string& nonce) const {
  const Unit* unit = find(nonce);
  return unit ? unit->lease_until : Clock::time_point::min();
}

Stop Holdings::stop_of(const std::string& nonce) const {
  const Unit* unit = find(nonce);
  return unit ? unit->stop : Stop::kLost;
}

Clock::time_point Holdings::next_wakeup() const {
  auto at = Clock::time_point::max();
  bool step_pending = false;
  for (const Unit& unit : units_) {
    step_pending |= unit.step_pending;
    if (rank(unit.stop) < rank(Stop::kLapsed)) at = std::min(at, unit.lease_until);
  }
  if (!units_.empty() && !renewing_) {
    at = std::min(at, std::max(retry_at_, last_renewal_ + (step_pending ? timing_.step : timing_.renew)));
  }
  return at;
}

std::vector<Action> Holdings::decide(Clock::time_point now) {
  std::vector<Action> actions;
  for (Unit& unit : units_) {
    if (unit.lease_until <= now) request_stop(unit, Stop::kLapsed);
  }
  std::erase_if(units_, [&](Unit& unit) {
    if (unit.stop == Stop::kNone) return false;
    const bool answered = unit.stage == Stage::kStarting && unit.confirmed;
    if (unit.stage < Stage::kStarting || answered || unit.has_stopped) {
      actions.push_back(settle(unit));
      return true;
    }
    if (unit.stage == Stage::kDenoising && !unit.stop_given) {
      unit.stop_given = true;
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
  if (!device_busy()) {
    const auto next =
        std::find_if(units_.begin(), units_.end(), [](const Unit& u) { return u.stage == Stage::kPrepared; });
    if (next != units_.end()) {
      next->stage = Stage::kStarting;
      actions.push_back({Action::Kind::kStart, next->attempt});
    }
  }
  if (!text_busy_) {
    const auto next = std::find_if(units_.begin(), units_.end(),
                                   [](const Unit& u) { return u.stage == Stage::kAssigned && !u.waits; });
    if (next != units_.end()) {
      text_busy_ = true;
      next->stage = Stage::kEncoding;
      actions.push_back({Action::Kind::kEncodeText, next->attempt});
    }
  }
  return actions;
}

std::vector<queue::UnitRef> Holdings::refs() const {
  std::vector<queue::UnitRef> refs;
  for (const Unit& unit : units_) refs.push_back(unit.attempt.ref);
  return refs;
}

std::vector<queue::Attempt> Holdings::attempts() const {
  std::vector<queue::Attempt> attempts;
  for (const Unit& unit : units_) attempts.push_back(unit.attempt);
  return attempts;
}

}  // namespace ditfleet::worker
