#include "coordinator/scheduling/scheduler.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace ditfleet::scheduling {
namespace {

constexpr std::size_t kKeptTenants = 4096;
// So many new jobs at most, with so many bytes of specs, are assigned together with their admission instead of after
// its event: their admissions fit into one call, which Redis runs before the assignments that follow it.
constexpr std::size_t kMostAhead = 128, kMostAheadBytes = 1 << 20;
// A relative error of a prediction from which on the charges for other held units are corrected too.
constexpr double kRechargeFrom = 0.1;

}  // namespace

Scheduler::Scheduler(SchedulerOptions options)
    : options_(std::move(options)),
      queue_(options_.weights, options_.age_bound_ms * 1000),
      fleet_(options_.lookahead, options_.silent_after_ms * 1000),
      jobs_(options_.catalogue, *options_.routing, options_.refuse_too_large, queue_, fleet_, costs_),
      recovery_(jobs_, fleet_, costs_) {}

void Scheduler::rebuild(std::span<const queue::UnitView> open, const std::map<std::string, std::int64_t>& virtual_times,
                        const std::vector<queue::WorkerInfo>& workers, std::int64_t grace_ms, std::int64_t now_us) {
  grant_grace(grace_ms, now_us);
  update_fleet(workers, now_us);
  recovery_.rebuild(open, now_us);
  // Last: the stored times include the charges for held units, which were just made again.
  queue_.tenants().restore(virtual_times);
}

std::vector<WorkerId> Scheduler::update_fleet(const std::vector<queue::WorkerInfo>& workers, std::int64_t now_us) {
  auto freed = fleet_.update(workers, now_us, [this](const std::string& name) { return jobs_.intern_model(name); });
  slots_seen_.resize(jobs_.models().size(), 0);
  for (ModelId m = 0; m < slots_seen_.size(); ++m) {
    const int slots = fleet_.most_adapter_slots(m);
    queue_.set_most_slots(m, slots);
    slots_seen_[m] = std::max(slots_seen_[m], slots);
  }
  return freed;
}

std::optional<Error> Scheduler::unmet_by_fleet(const Classified& job) const {
  const auto m = jobs_.find_model(job.spec.model);
  if (!m || *m >= slots_seen_.size()) return std::nullopt;
  const auto& workers = fleet_.with_model(*m);
  const bool unreported = std::any_of(workers.begin(), workers.end(), [this](WorkerId w) {
    return fleet_.at(w).state == WorkerState::kStarting && fleet_.adapters().slots(w) == 0;
  });
  if (auto unmet = unmet_slots(job.spec, unreported ? 0 : slots_seen_[*m])) return unmet;
  const auto w = options_.refuse_too_large ? fleet_.roomiest(*m) : std::nullopt;
  return w ? unmet_memory(job, fleet_.at(*w).name, *fleet_.memory(*m, *w)) : std::nullopt;
}

void Scheduler::on_intake(std::span<const queue::IntakeEntry> entries, std::int64_t now_us) {
  for (const auto& entry : entries) {
    auto job = examine(entry, options_.catalogue, options_.precision, options_.adapters);
    if (!job) {
      pending_.reject.push_back(make_rejection(entry, job.error()));
      continue;
    }
    if (options_.webhook_url && job->spec.webhook.url.empty())
      job->spec.webhook.url = options_.webhook_url(entry.tenant);
    auto* known = jobs_.find_job(entry.id);
    const bool fresh = known == nullptr;
    const auto deadline = deadline_us(entry, job->spec);
    auto unmet = fresh ? unmet_by_fleet(*job) : std::nullopt;
    if (!unmet && !deadlines_held_) unmet = unmet_deadline(estimate(job->spec, entry.tenant, now_us), deadline, now_us);
    if (unmet) {
      pending_.reject.push_back(make_rejection(entry, std::move(*unmet)));
      continue;
    }
    if (fresh) {
      known = &jobs_.add(entry.id, entry.tenant, job->spec.model, job->class_key, adapters_of(job->spec), now_us);
      jobs_.grow(*known, job->spec.n.value_or(1), now_us);
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
      for (auto& unit : known->units) jobs_.ready(unit, now_us, now_us);
    }
  }
}

void Scheduler::on_event(const queue::Event& event, std::int64_t now_us) {
  auto* job = jobs_.find_job(event.job);
  if (job == nullptr) {
    // The scheduler does not know the job, so it has missed an event.
    if (event.type == "ready" || event.type == "assigned" || event.type == "started") recovery_.request_audit();
    return;
  }
  if (event.unit >= 0) {
    if (event.unit < std::ssize(job->units)) on_unit_event(job->units[event.unit], event, now_us);
    return;
  }
  const auto state = job::state_from_name(event.type);
  if (state && job::is_terminal(*state)) {
    jobs_.end_units(*job, std::nullopt, now_us);
  } else if (event.type == "ready") {
    for (auto& unit : job->units) {
      jobs_.touch(unit, now_us);
      if (unit.where == Where::kPending) jobs_.ready(unit, event.at_ms * 1000, now_us);
    }
  }
}

void Scheduler::on_unit_event(Unit& unit, const queue::Event& event, std::int64_t now_us) {
  if (unit.where == Where::kEnded) {
    if (event.type == "ready") recovery_.request_audit();  // Redis lost its end
    return;
  }
  if (event.type == "ready") {
    const auto reason = event.field("reason");
    // Until the registry reports that the worker drains, it would get the same unit again.
    if (unit.where == Where::kHeld && reason == "handed back") fleet_.handed_back(unit.worker, event.at_ms * 1000);
    if (unit.where == Where::kHeld && reason == "retry") fleet_.failed(unit.worker, now_us);
    const bool admitted = reason.empty();
    if (!admitted)
      jobs_.set_past(unit, std::atoi(event.field("lapses").c_str()), queue::split_list(event.field("failed_on")),
                     now_us);
    // An audit that was asked for before, and has not seen it, must leave it alone. But a unit that is held was either
    // assigned ahead of its admission, which another event confirms, or admitted anew after Redis lost data. So was one
    // that is paused or delayed.
    const bool aside = unit.where == Where::kPaused || unit.where == Where::kDelayed;
    if (!admitted || (unit.where != Where::kHeld && !aside)) jobs_.touch(unit, now_us);
    if (admitted && aside) recovery_.request_audit();
    if (!admitted && event.fields.contains("not_before_ms")) {
      // Another "ready" follows when the retry is due, or the job is resumed.
      jobs_.put_aside(unit, reason == "paused" ? Where::kPaused : Where::kDelayed, now_us);
    } else if (!admitted || unit.where == Where::kPending || unit.where == Where::kUnknown) {
      jobs_.ready(unit, event.at_ms * 1000, now_us);
    }
  } else if (event.type == "assigned" || event.type == "started") {
    const auto nonce = event.field("nonce");
    if (unit.where != Where::kHeld || (!nonce.empty() && unit.nonce != nonce)) {
      recovery_.request_audit();  // assigned by another leader; the event has too few fields
      return;
    }
    jobs_.touch(unit, now_us);
    if (event.type == "started") fleet_.started(unit.worker, unit.ref(), event.at_ms * 1000);
  } else if (const auto state = job::state_from_name(event.type); state && job::is_terminal(*state)) {
    if (*state == job::State::kSucceeded) learn(unit, event);
    if (unit.where == Where::kHeld) note_outcome(unit, *state, now_us);
    jobs_.touch(unit, now_us);
    jobs_.end(unit, event.at_ms * 1000);
  }
}

// What the end of a unit says of its worker, and of workers on which the unit failed before.
void Scheduler::note_outcome(const Unit& unit, job::State state, std::int64_t now_us) {
  const auto& worker = fleet_.at(unit.worker);
  if (state == job::State::kFailed && worker.backoff_us > 0) fleet_.failed(unit.worker, now_us);
  if (state != job::State::kSucceeded) return;
  fleet_.succeeded(unit.worker);
  for (const auto& name : unit.failed_on) {
    if (name != worker.name) fleet_.failed_alone(name, now_us);
  }
}

// Corrects the cost model by the observed run, and settles the tenant's charge.
void Scheduler::learn(Unit& unit, const queue::Event& event) {
  const Job& job = unit.job;
  const auto* held = unit.where == Where::kHeld ? fleet_.find_held(unit.worker, unit.ref()) : nullptr;
  if (held == nullptr || !held->started) return;
  // A worker prepares the next unit while the one before runs; the overlap is not part of this run.
  const auto began = std::max(held->started_us, fleet_.at(unit.worker).last_end_us);
  const auto observed = event.at_ms * 1000 - began;
  if (observed <= 0) return;
  // The load of the model is no part of the run either. It is a prediction, so at most half of the time counts as load.
  const auto run_us = observed - std::min(held->load_us, observed / 2);
  const auto charged_us = unit.charged_us;
  if (options_.observer)
    options_.observer->ran(queue_.tenants().name(job.tenant), jobs_.class_at(job.cls).key, unit.guess ? 0 : charged_us,
                           observed);
  costs_.observe(job.cls, job.model, unit.worker, job.prior_us, run_us, held->cold);
  jobs_.settle(unit, observed);
  const auto error = static_cast<double>(std::abs(observed - charged_us));
  if (unit.guess || error > kRechargeFrom * static_cast<double>(charged_us)) jobs_.recharge(job.model);
}

void Scheduler::on_workers(const std::vector<queue::WorkerInfo>& workers, std::int64_t now_us) {
  for (const auto w : update_fleet(workers, now_us)) costs_.forget_worker(w);
  jobs_.repark(now_us);
  revoke_from_absent(now_us);
  revoke_for_idle(now_us);
  queue_.tenants().prune(kKeptTenants);
  fleet_.adapters().prune();
}

void Scheduler::on_assign_refused(const queue::UnitRef& ref, const std::string& nonce, std::int64_t now_us) {
  auto* unit = jobs_.find_unit(ref);
  if (unit == nullptr || unit->where != Where::kHeld || unit->nonce != nonce) return;
  jobs_.put_aside(*unit, Where::kUnknown, now_us);
  jobs_.touch(*unit, now_us);
  recovery_.request_audit();
}

Estimate Scheduler::estimate(const job::JobSpec& spec, const std::string& tenant, std::int64_t now_us) const {
  Estimate out;
  const auto entry = options_.catalogue.models.find(spec.model);
  if (entry == options_.catalogue.models.end()) return out;
  const auto job = classify(spec, entry->second, options_.precision);
  out.run_us = job.prior_us;
  const auto model = jobs_.find_model(spec.model);
  if (!model) return out;
  const auto cls = jobs_.find_class(job.class_key);
  const auto c = cls.value_or(-1);
  const auto m = *model;
  out.run_us = cls ? costs_.typical_run_us(c, m, job.prior_us) : costs_.unseen_run_us(m, job.tokens, job.prior_us);
  out.observed = costs_.observed(m);
  // A lower bound: counts the tenant's own queue only, not the shares of other tenants.
  std::int64_t soonest = -1, workers = 0;
  for (const auto w : fleet_.with_model(m)) {
    const auto& worker = fleet_.at(w);
    if (worker.state != WorkerState::kReady) continue;
    ++workers;
    const auto wait = std::max<std::int64_t>(0, fleet_.load(w).start_us(now_us) - now_us);
    soonest = soonest < 0 ? wait : std::min(soonest, wait);
  }
  if (workers == 0) return out;
  const auto t = queue_.tenants().find(tenant);
  const auto work = t ? queue_.tenant_work_us(m, *t) : 0;
  out.wait_us = soonest + (work > 0 ? costs_.typical_run_us(c, m, work) / workers : 0);
  return out;
}

std::optional<std::pair<std::string, std::string>> Scheduler::class_of(const std::string& id) const {
  const Job* job = jobs_.find_job(id);
  if (!job) return std::nullopt;
  return std::pair(jobs_.class_at(job->cls).key, jobs_.models()[job->model]);
}

std::string Scheduler::first_adapter_of(const std::string& id) const {
  const Job* job = jobs_.find_job(id);
  if (!job || jobs_.lanes()[job->lane].adapters.empty()) return {};
  return fleet_.adapters().name(jobs_.lanes()[job->lane].adapters.front());
}

QueueStats Scheduler::stats() const {
  QueueStats out;
  out.jobs = jobs_.all().size();
  out.unplaceable = queue_.unplaceable();
  for (const auto& [id, job] : jobs_.all()) {
    for (const auto& unit : job->units) {
      if (unit.waits())
        out.oldest_ready_us = out.ready++ == 0 ? unit.ready_us : std::min(out.oldest_ready_us, unit.ready_us);
      out.unplaceable += unit.where == Where::kParked;
      out.held += unit.where == Where::kHeld;
      out.delayed += unit.where == Where::kDelayed;
    }
  }
  for (WorkerId w = 0; w < fleet_.id_bound(); ++w) {
    const auto& worker = fleet_.at(w);
    if (worker.owner.empty()) continue;
    ++out.workers[worker.state];
    using enum WorkerState;
    if (worker.state == kSilent || worker.state == kStuck || worker.state == kOverdue || worker.state == kProbing)
      out.unwell[worker.name] = worker.state;
  }
  return out;
}

}  // namespace ditfleet::scheduling
