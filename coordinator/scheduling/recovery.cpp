#include "coordinator/scheduling/recovery.h"

#include <algorithm>
#include <tuple>
#include <unordered_set>
#include <vector>

namespace ditfleet::scheduling {

void Recovery::rebuild(std::span<const queue::UnitView> open, std::int64_t now_us) {
  // In the order of arrival, so that ties break as before the restart.
  std::vector<const queue::UnitView*> views;
  for (const auto& view : open) views.push_back(&view);
  std::stable_sort(views.begin(), views.end(), [](const auto* a, const auto* b) {
    return std::tie(a->created_ms, a->ref) < std::tie(b->created_ms, b->ref);
  });
  for (const auto* view : views) apply(*view, now_us);
  for (auto it = jobs_.all().begin(); it != jobs_.all().end();) {  // units that are not stored have ended
    auto& job = *(it++)->second;                                   // the next call may erase it
    jobs_.end_units(job, Where::kPending, now_us);
  }
}

Job& Recovery::job_of(const queue::UnitView& view, std::int64_t now_us) {
  if (auto* known = jobs_.find_job(view.ref.job)) return *known;
  auto& job = jobs_.add(view.ref.job, view.tenant, view.model, view.class_key, view.adapters, now_us);
  job.priority = view.priority;
  job.cost_us = view.cost_us;
  job.deadline_us = view.deadline_ms * 1000;
  const auto shape = job::parse_class_key(view.class_key);
  job.prior_us = shape && view.steps > 0
                     ? prior_run_us(*shape, jobs_.tokens_of(*shape), view.steps, !view.adapters.empty())
                     : std::max<std::int64_t>(1, view.cost_us);
  costs_.seed(job.cls, job.model, job.prior_us, job.cost_us);
  return job;
}

void Recovery::apply(const queue::UnitView& view, std::int64_t now_us) {
  // Views come one unit at a time.
  jobs_.grow(job_of(view, now_us), std::clamp(view.ref.unit, 0, JobTable::kMaxUnits - 1) + 1, now_us);
  auto* unit = jobs_.find_unit(view.ref);
  if (unit == nullptr) return;
  jobs_.set_past(*unit, view.lapses, view.failed_on, now_us);
  if (view.state == job::State::kReady && view.not_before_ms * 1000 > now_us) {
    jobs_.touch(*unit, now_us);
    const bool paused = view.not_before_ms >= queue::kPausedUntilMs;
    jobs_.put_aside(*unit, paused ? Where::kPaused : Where::kDelayed, now_us);
  } else if (view.state == job::State::kReady) {
    jobs_.ready(*unit, view.ready_ms * 1000, now_us);
  } else if (view.state == job::State::kAssigned || view.state == job::State::kRunning) {
    jobs_.found_held(*unit, view.owner, view.nonce, now_us);
    const auto* held = fleet_.find_held(unit->worker, view.ref);
    if (view.state == job::State::kRunning && held != nullptr && !held->started)
      fleet_.started(unit->worker, view.ref, now_us);
  }
}

void Recovery::audit(std::span<const queue::UnitView> open, std::int64_t now_us) {
  std::unordered_set<const Unit*> stored;
  for (const auto& view : open) stored.insert(jobs_.find_unit(view.ref));
  std::vector<queue::UnitRef> vanished;
  for (const auto& [id, job] : jobs_.all()) {
    for (const auto& unit : job->units) {
      if (unit.where == Where::kEnded || jobs_.touched(unit)) continue;
      if (!stored.contains(&unit)) vanished.push_back(unit.ref());
    }
  }
  for (const auto& ref : vanished) {
    Unit& unit = *jobs_.find_unit(ref);
    // It may have been admitted anew after the units were read, which does not touch it.
    if (unit.where == Where::kHeld) request_audit();
    jobs_.end(unit, now_us);
  }
  const auto ended = jobs_.take_ended();
  for (const auto& view : open) {
    auto* unit = jobs_.find_unit(view.ref);
    if (ended && ended->contains(view.ref.job) && jobs_.find_job(view.ref.job) == nullptr) continue;
    if (unit != nullptr && jobs_.touched(*unit)) continue;
    if (unit != nullptr && unit->where == Where::kEnded) jobs_.reopen(*unit);  // Redis lost its end
    const bool queued =
        unit != nullptr && unit->waits() && unit->lapses == view.lapses && unit->failed_on == view.failed_on;
    const bool held = unit != nullptr && unit->where == Where::kHeld && unit->nonce == view.nonce;
    if (queued && view.state == job::State::kReady) continue;
    if (held && view.state == job::State::kAssigned) continue;
    apply(view, now_us);
  }
}

}  // namespace ditfleet::scheduling
