// Scheduler: events of the intake, the feed and the registry.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "coordinator/scheduling/scheduler.h"

namespace ditfleet::scheduling {
namespace {

constexpr std::size_t kKeptTenants = 4096;
// So many new jobs at most, with so many bytes of specs, are assigned together with their admission instead of after
// its event: their admissions fit into one call, which Redis runs before the assignments that follow it.
constexpr std::size_t kMostAhead = 128, kMostAheadBytes = 1 << 20;
// A relative error of a prediction from which on the charges for other held units are corrected too.
constexpr double kRechargeFrom = 0.1;

}  // namespace

void Scheduler::on_intake(std::span<const queue::IntakeEntry> entries, std::int64_t now_us) {
  for (const auto& entry : entries) {
    auto job = examine(entry, options_.catalogue, options_.precision, options_.adapters);
    if (!job) {
      pending_.reject.push_back(make_rejection(entry, job.error()));
      continue;
    }
    auto* known = find_job(entry.id);
    const bool fresh = known == nullptr;
    const auto deadline = deadline_us(entry, job->spec);
    auto unmet = fresh ? unmet_slots(job->spec, most_slots_seen(job->spec.model)) : std::nullopt;
    if (fresh && !unmet) unmet = unmet_memory(*job);
    if (!unmet && !deadlines_held_) unmet = unmet_deadline(estimate(job->spec, entry.tenant, now_us), deadline, now_us);
    if (unmet) {
      pending_.reject.push_back(make_rejection(entry, std::move(*unmet)));
      continue;
    }
    if (fresh) {
      known = &add_job(entry.id, entry.tenant, job->spec.model, job->class_key, adapters_of(job->spec),
                       job->spec.n.value_or(1), now_us);
      known->prior_us = job->prior_us;
      known->cost_us = costs_.typical_run_us(known->cls, known->model, known->prior_us);
      known->priority = job->spec.priority;
      known->deadline_us = deadline;
    }
    // Also of a job that is known: an entry that is read again has not been acknowledged yet.
    pending_.admit.push_back(make_admission(entry, *job, known->cost_us));
    pending_bytes_ += pending_.admit.back().spec.size();
    // Not of a plain entry, which may turn out to be another name of a job.
    if (fresh && pending_.admit.size() <= kMostAhead && pending_bytes_ <= kMostAheadBytes && !entry.raw) {
      for (int i = 0; i < static_cast<int>(known->units.size()); ++i) unit_ready(*known, i, now_us, now_us);
    }
  }
}

void Scheduler::on_event(const queue::Event& event, std::int64_t now_us) {
  auto* job = find_job(event.job);
  if (job == nullptr) {
    // The scheduler does not know the job, so it has missed an event.
    if (event.type == "ready" || event.type == "assigned" || event.type == "started") wants_audit_ = true;
    return;
  }
  if (event.unit >= 0) {
    if (event.unit < static_cast<int>(job->units.size())) on_unit_event(*job, event, event.unit, now_us);
    return;
  }
  const auto state = job::state_from_name(event.type);
  if (state && job::is_terminal(*state)) {
    end_units(*job, std::nullopt, now_us);
  } else if (event.type == "ready") {
    for (int i = 0; i < static_cast<int>(job->units.size()); ++i) {
      if (job->units[i].where == Unit::Where::kPending)
        unit_ready(*job, i, event.at_ms * 1000, now_us);
      else
        job->units[i].touched_us = now_us;
    }
  }
}

void Scheduler::on_unit_event(Job& job, const queue::Event& event, int index, std::int64_t now_us) {
  auto& unit = job.units[index];
  if (unit.where == Unit::Where::kEnded) return;
  const auto nonce = event.field("nonce");
  if (event.type == "ready") {
    const auto reason = event.field("reason");
    // Until the registry reports that the worker drains, it would get the same unit again.
    if (unit.where == Unit::Where::kHeld && reason == "handed back")
      fleet_.handed_back(unit.worker, event.at_ms * 1000);
    if (unit.where == Unit::Where::kHeld && reason == "retry") fleet_.failed(unit.worker, now_us);
    const bool admitted = reason.empty();
    if (!admitted) {
      set_past(job, index, std::atoi(event.field("lapses").c_str()), queue::split_list(event.field("failed_on")),
               now_us);
    }
    if (admitted) {              // it may have been assigned ahead of that
      unit.touched_us = now_us;  // an audit that was asked for before, and has not seen it, must leave it alone
      if (unit.where == Unit::Where::kPending || unit.where == Unit::Where::kUnknown)
        unit_ready(job, index, event.at_ms * 1000, now_us);
    } else if (event.fields.contains("not_before_ms")) {
      unit_delayed(job, index, now_us);  // another "ready" follows when the retry is due
    } else {
      unit_ready(job, index, event.at_ms * 1000, now_us);
    }
  } else if (event.type == "assigned" || event.type == "started") {
    if (unit.where != Unit::Where::kHeld || (!nonce.empty() && unit.nonce != nonce)) {
      wants_audit_ = true;  // assigned by another leader; the event has too few fields
      return;
    }
    unit.touched_us = now_us;
    if (event.type == "started") fleet_.started(unit.worker, {job.id, index}, event.at_ms * 1000);
  } else if (const auto state = job::state_from_name(event.type); state && job::is_terminal(*state)) {
    if (*state == job::State::kSucceeded) learn(job, unit, index, event);
    if (unit.where == Unit::Where::kHeld) note_outcome(unit, *state, now_us);
    unit_ended(job, index, event.at_ms * 1000);
  }
}

// What the end of a unit says of its worker, and of workers on which the unit failed before.
void Scheduler::note_outcome(const Unit& unit, job::State state, std::int64_t now_us) {
  if (state == job::State::kFailed && fleet_.at(unit.worker).backoff_us > 0) fleet_.failed(unit.worker, now_us);
  if (state != job::State::kSucceeded) return;
  fleet_.succeeded(unit.worker);
  for (const auto& name : unit.failed_on) {
    if (name != fleet_.at(unit.worker).name) fleet_.failed_alone(name, now_us);
  }
}

// Corrects the cost model by the observed run, and settles the tenant's charge.
void Scheduler::learn(const Job& job, Unit& unit, int index, const queue::Event& event) {
  if (unit.where != Unit::Where::kHeld) return;
  const auto* held = fleet_.find_held(unit.worker, {job.id, index});
  if (held == nullptr || !held->started) return;
  // A worker prepares the next unit while the one before runs; the overlap is not part of this run.
  const auto began = std::max(held->started_us, fleet_.at(unit.worker).last_end_us);
  const auto observed = event.at_ms * 1000 - began;
  if (observed <= 0) return;
  // The load of the model is no part of the run either. It is a prediction, so at most half of the time counts as load.
  const auto run_us = observed - std::min(held->load_us, observed / 2);
  if (options_.observer)
    options_.observer->ran(queue_.tenants().name(job.tenant), classes_[job.cls].key, unit.guess ? 0 : unit.charged_us,
                           observed);
  costs_.observe(job.cls, job.model, unit.worker, job.prior_us, run_us, held->cold);
  const auto charged = static_cast<double>(unit.charged_us);
  const bool guess = unit.guess;
  settle(job, unit, index, observed);
  if (guess || std::abs(static_cast<double>(observed) - charged) > kRechargeFrom * charged) recharge(job.model);
}

void Scheduler::on_workers(const std::vector<queue::WorkerInfo>& workers, std::int64_t now_us) {
  for (const auto w : update_fleet(workers, now_us)) costs_.forget_worker(w);
  repark(now_us);
  revoke_from_absent(now_us);
  revoke_for_idle(now_us);
  queue_.tenants().prune(kKeptTenants);
  fleet_.adapters().prune();
}

void Scheduler::on_assign_refused(const queue::UnitRef& ref, const std::string& nonce, std::int64_t now_us) {
  Job* job = nullptr;
  auto* unit = find_unit(ref, &job);
  if (unit == nullptr || unit->where != Unit::Where::kHeld || unit->nonce != nonce) return;
  leave(*job, *unit, ref.unit, now_us);
  unit->where = Unit::Where::kUnknown;
  unit->touched_us = now_us;
  wants_audit_ = true;
}

}  // namespace ditfleet::scheduling
