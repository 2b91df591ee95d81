// Scheduler: charging tenants in advance, and correcting the charges as predictions improve.
#include <tuple>
#include <utility>

#include "coordinator/scheduling/scheduler.h"

namespace ditfleet::scheduling {

// The predicted cost of a unit, and whether it is a guess.
std::pair<std::int64_t, bool> Scheduler::prediction(const Job& job, bool cold) const {
  const auto run_us = costs_.typical_run_us(job.cls, job.model, job.prior_us);
  const auto cold_us = costs_.observed_cold_us(job.model);
  return {run_us + (cold ? cold_us.value_or(0) : 0), !costs_.confirmed(job.model) || (cold && !cold_us)};
}

void Scheduler::charge(const Job& job, Unit& unit, bool cold) {
  std::tie(unit.charged_us, unit.guess) = prediction(job, cold);
  queue_.charge(job.tenant, unit.charged_us, unit.guess);
}

void Scheduler::settle(const Job& job, Unit& unit, int index, std::int64_t actual_us) {
  if (unit.charged_us == 0) return;
  if (actual_us < 0) {
    const auto* held = unit.where == Unit::Where::kHeld ? fleet_.find_held(unit.worker, {job.id, index}) : nullptr;
    actual_us = held != nullptr && held->started ? unit.charged_us : 0;
  }
  queue_.settle(job.tenant, unit.charged_us, actual_us, unit.guess);
  unit.charged_us = 0;
}

// Applies the current predictions to the charges made in advance, so that a wrong first guess does not last.
void Scheduler::recharge(ModelId model) {
  for (const auto w : fleet_.with_model(model)) {
    for (const auto& held : fleet_.at(w).held) {
      Job* job = nullptr;
      auto* unit = find_unit(held.ref, &job);
      if (unit == nullptr || unit->charged_us == 0 || job->model != model) continue;
      const auto [cost_us, guess] = prediction(*job, held.cold);
      queue_.correct(job->tenant, unit->charged_us, cost_us, std::exchange(unit->guess, guess), guess);
      unit->charged_us = cost_us;
    }
  }
}

}  // namespace ditfleet::scheduling
