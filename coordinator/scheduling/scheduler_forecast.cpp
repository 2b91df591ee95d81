// Scheduler: the predicted work of the fleet, for autoscalers and for whoever waits until a worker is empty.
#include <algorithm>

#include "coordinator/scheduling/scheduler.h"
#include "shared/job/validate.h"

namespace ditfleet::scheduling {
namespace {

constexpr std::int64_t kLeastUs = 10'000;  // what remains of a unit that runs longer than predicted

}  // namespace

std::int64_t Scheduler::held_run_us(const HeldUnit& held, WorkerId w) const {
  const auto* job = find_job(held.ref.job);
  if (job == nullptr) return held.run_us;
  const auto run_us = costs_.run_us(job->cls, job->model, w, job->prior_us);
  return run_us + (held.cold ? costs_.cold_us(job->model, run_us) : 0) + held.load_us;
}

std::map<std::string, std::int64_t> Scheduler::ends_ms() const {
  std::map<std::string, std::int64_t> out;
  for (WorkerId w = 0; w < fleet_.id_bound(); ++w) {
    const auto& worker = fleet_.at(w);
    for (const auto& held : worker.held) {
      if (!held.started) continue;
      auto& end_ms = out[worker.owner];
      end_ms = std::max(end_ms, (std::max(held.started_us, worker.last_end_us) + held_run_us(held, w)) / 1000);
    }
  }
  return out;
}

std::size_t Scheduler::pending_jobs() const {
  return static_cast<std::size_t>(std::count_if(jobs_.begin(), jobs_.end(), [](const auto& entry) {
    return entry.second->units.front().where == Unit::Where::kPending;
  }));
}

queue::FleetForecast Scheduler::forecast(std::size_t unread, std::int64_t now_us) const {
  queue::FleetForecast out;
  const auto& catalogue = options_.catalogue;
  for (const auto& [name, unused] : catalogue.models) out.models[name];
  const auto of = [&](ModelId m) -> queue::FleetForecast::Model& {
    return out.models[catalogue.models.contains(models_[m]) ? models_[m] : "other"];
  };
  for (const auto& [id, job] : jobs_) {
    const auto held = std::count_if(job->units.begin(), job->units.end(),
                                    [](const Unit& unit) { return unit.where == Unit::Where::kHeld; });
    auto& model = of(job->model);
    model.units += static_cast<std::int64_t>(job->open);
    model.backlog_us +=
        (static_cast<std::int64_t>(job->open) - held) * costs_.typical_run_us(job->cls, job->model, job->prior_us);
  }
  for (WorkerId w = 0; w < fleet_.id_bound(); ++w) {
    const auto& worker = fleet_.at(w);
    for (const auto& held : worker.held) {
      const auto run_us = held_run_us(held, w);
      const auto began_us = std::max(held.started_us, worker.last_end_us);
      of(held.model).backlog_us += held.started ? std::max(kLeastUs, began_us + run_us - now_us) : run_us;
    }
    if (worker.state != WorkerState::kReady) continue;
    ++out.ready_workers;
    for (const auto m : worker.models) ++of(m).ready_workers;
  }
  if (unread > 0 && !catalogue.models.empty()) {
    const auto& name = catalogue.default_model.empty() ? catalogue.models.begin()->first : catalogue.default_model;
    job::JobSpec spec;
    spec.model = name;
    spec.prompt = "unread";
    if (auto complete = job::complete_spec(std::move(spec), catalogue)) {
      auto& model = out.models[name];
      const auto jobs = static_cast<std::int64_t>(unread);
      model.units += jobs;
      model.backlog_us += jobs * estimate(*complete, {}, now_us).run_us;
    }
  }
  out.ends_ms = ends_ms();
  return out;
}

}  // namespace ditfleet::scheduling
