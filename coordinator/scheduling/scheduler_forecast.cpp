// Scheduler: the predicted work of the fleet, for autoscalers and for whoever waits until a worker is empty.
#include <algorithm>
#include <limits>

#include "coordinator/scheduling/scheduler.h"
#include "shared/job/validate.h"

namespace ditfleet::scheduling {
namespace {

constexpr std::int64_t kLeastUs = 10'000;  // what remains of a unit that runs longer than predicted

}  // namespace

std::int64_t Scheduler::held_run_us(const HeldUnit& held, WorkerId w) const {
  const auto* job = jobs_.find_job(held.ref.job);
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
  return static_cast<std::size_t>(std::count_if(jobs_.all().begin(), jobs_.all().end(), [](const auto& entry) {
    return entry.second->units.front().where == Where::kPending;
  }));
}

queue::FleetForecast Scheduler::forecast(std::size_t unread, std::int64_t now_us) const {
  queue::FleetForecast out;
  const auto& catalogue = options_.catalogue;
  for (const auto& [name, unused] : catalogue.models) out.models[name];
  const auto of = [&](ModelId m) -> queue::FleetForecast::Model& {
    return out.models[catalogue.models.contains(jobs_.models()[m]) ? jobs_.models()[m] : "other"];
  };
  for (const auto& [id, job] : jobs_.all()) {
    const auto count = [&job](Where where) {
      return std::count_if(job->units.begin(), job->units.end(), [&](const Unit& unit) { return unit.where == where; });
    };
    auto& model = of(job->model);
    const auto units = static_cast<std::int64_t>(job->open) - count(Where::kPaused);  // nobody works for those
    model.units += units;
    model.backlog_us += (units - count(Where::kHeld)) * costs_.typical_run_us(job->cls, job->model, job->prior_us);
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

// Places held and queued units on the ready workers, each on the one that is free first.
std::map<std::string, queue::JobOutlook> Scheduler::outlook(std::size_t most, std::int64_t now_us) const {
  constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max() / 4;
  struct Expected {
    std::int64_t start_us = kNever, end_us = 0;  // of its first and its last unit
    std::size_t arrival = 0, units = 0;          // units: how many were placed
    bool started = false;
  };
  std::unordered_map<const Job*, Expected> jobs;
  const auto place = [&](const Job* job, std::int64_t start_us, std::int64_t end_us, bool started = false) {
    auto& expected = jobs.try_emplace(job, Expected{.arrival = jobs.size()}).first->second;
    expected.start_us = std::min(expected.start_us, start_us);
    expected.end_us = std::max(expected.end_us, end_us);
    expected.started |= started;
    ++expected.units;
  };
  std::vector<std::pair<std::int64_t, WorkerId>> free;  // ready workers and when they have run what they hold
  for (WorkerId w = 0; w < fleet_.id_bound(); ++w) {
    const auto& worker = fleet_.at(w);
    std::int64_t free_us = now_us;
    for (const auto& held : worker.held) {
      const auto start_us =
          held.started ? std::max(held.started_us, worker.last_end_us) : std::max(free_us, held.ready_us);
      free_us = worker.returns_units(now_us) ? kNever : std::max(now_us + kLeastUs, start_us + held_run_us(held, w));
      if (const auto* job = jobs_.find_job(held.ref.job)) place(job, start_us, free_us, held.started);
    }
    if (worker.state == WorkerState::kReady) free.emplace_back(free_us, w);
  }
  for (const auto handle : queue_.order(most, now_us)) {
    const auto* job = &jobs_.queued(handle).job;
    std::pair<std::int64_t, WorkerId>* first = nullptr;
    for (auto& slot : free) {
      const auto& models = fleet_.at(slot.second).models;
      if ((!first || slot < *first) && std::find(models.begin(), models.end(), job->model) != models.end() &&
          jobs_.fits(*job, slot.second))
        first = &slot;
    }
    if (!first) {
      place(job, kNever, kNever);
      continue;
    }
    const auto run_us = costs_.run_us(job->cls, job->model, first->second, job->prior_us);
    const auto cold_us = fleet_.is_warm(job->cls, first->second) ? 0 : costs_.cold_us(job->model, run_us);
    place(job, first->first, first->first + run_us + cold_us);
    first->first += run_us;
  }
  std::vector<std::pair<const Job*, Expected>> order(jobs.begin(), jobs.end());
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.start_us, a.second.arrival) < std::pair(b.second.start_us, b.second.arrival);
  });
  std::map<std::string, queue::JobOutlook> out;
  std::map<ModelId, std::int64_t> waiting;
  for (const auto& [job, expected] : order) {
    const bool known = costs_.observed(job->model) && expected.units == job->open && expected.end_us < kNever;
    out[job->id] = {expected.started ? -1 : waiting[job->model]++, known ? expected.end_us / 1000 : 0};
  }
  return out;
}

}  // namespace ditfleet::scheduling
