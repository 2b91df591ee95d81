// Scheduler: what a unit waits for, in words for whoever sent it. Nothing is decided here.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "coordinator/scheduling/scheduler.h"

namespace ditfleet::scheduling {
namespace {

std::string about(std::int64_t us) {
  if (us >= 10'000'000) return fmt::format("about {} s", us / 1'000'000);
  return us < 1'000 ? "a moment" : fmt::format("about {} ms", us / 1'000);
}

std::string workers(std::size_t n) { return fmt::format("{} worker{}", n, n == 1 ? "" : "s"); }

}  // namespace

std::string Scheduler::waits_for(const queue::UnitRef& ref, std::int64_t now_us) const {
  const auto* job = find_job(ref.job);
  if (job == nullptr || ref.unit < 0 || ref.unit >= static_cast<int>(job->units.size())) return {};
  const auto& unit = job->units[static_cast<std::size_t>(ref.unit)];
  switch (unit.where) {
    case Unit::Where::kQueued: return queued_waits_for(*job, now_us);
    case Unit::Where::kHeld: return held_waits_for(unit, ref, now_us);
    case Unit::Where::kDelayed:
      return job->deadline_us > 0 && job->deadline_us <= now_us
                 ? "nothing any more: its deadline has passed"
                 : "its next attempt, after a pause: the last one failed";
    case Unit::Where::kPending:
    case Unit::Where::kUnknown:
    case Unit::Where::kEnded: break;
  }
  return {};
}

std::string Scheduler::queued_waits_for(const Job& job, std::int64_t now_us) const {
  const auto& lane = lanes_[job.lane];
  const auto needs = static_cast<int>(lane.adapters.size());
  const auto& model = models_[job.model];
  const auto& having = fleet_.with_model(job.model);
  if (having.empty()) return fmt::format("a worker with the model '{}': none is registered", model);
  if (const int most = fleet_.most_slots(job.model); needs > most) {
    if (most <= 0)
      return fmt::format("a worker that takes adapters: none of the {} with '{}' does", workers(having.size()), model);
    return fmt::format("a worker with {} adapter slots, one for each of its adapters: none with '{}' has more than {}",
                       needs, model, most);
  }
  std::map<Standing, std::size_t> standing;
  std::size_t fitting = 0, ready = 0, narrow_places = 0;
  bool place = false;
  std::int64_t soonest_us = -1;
  for (const auto w : having) {
    const auto& worker = fleet_.at(w);
    const auto& load = fleet_.load(w);
    if (fleet_.adapters().slots(w) < needs) {
      narrow_places += load.ready && load.has_slot();
      continue;
    }
    ++fitting;
    if (!load.ready) {
      ++standing[worker.standing == Standing::kReady ? Standing::kDraining
                                                     : worker.standing];  // it hands back what it is given
      continue;
    }
    ++ready;
    place |= load.has_slot();
    const auto free_us = load.start_us(now_us) - now_us;
    soonest_us = soonest_us < 0 ? free_us : std::min(soonest_us, free_us);
  }
  const auto able = [&](std::size_t n) {
    return fmt::format("{} with '{}'", workers(n), model) +
           (narrow_places > 0 ? fmt::format(" and {} adapter slots or more", needs) : "");
  };
  if (ready == 0) {
    std::string how;
    for (const auto& [what, n] : standing)
      how += fmt::format("{}{} {}", how.empty() ? "" : ", ", n, standing_name(what));
    return fmt::format("a worker that is ready: of {}, {}", able(fitting), how);
  }
  if (!place) {
    std::string out = fmt::format("a place: {} {} full, and the next is free in {}", able(ready),
                                  ready == 1 ? "is" : "are", about(soonest_us));
    if (narrow_places > 0)
      out += fmt::format("; {} with fewer slots {} a place", narrow_places, narrow_places == 1 ? "has" : "have");
    return out;
  }
  if (lane.skipped_round == round_ && lane.lacks_us > 0) {
    return needs > 0
               ? fmt::format("a worker that has its adapters: to load them where there is a place takes longer ({})",
                             about(lane.lacks_us))
               : fmt::format("a worker that is warm for its class: a cold one takes longer ({})", about(lane.lacks_us));
  }
  return "its turn: others are before it";
}

std::string Scheduler::held_waits_for(const Unit& unit, const queue::UnitRef& ref, std::int64_t now_us) const {
  const auto& worker = fleet_.at(unit.worker);
  const auto at =
      std::find_if(worker.held.begin(), worker.held.end(), [&](const HeldUnit& held) { return held.ref == ref; });
  if (at == worker.held.end() || at->started) return {};
  if (worker.standing != Standing::kReady && worker.standing != Standing::kStarting) {
    return fmt::format("its way back from {}, which is {}", worker.name, standing_name(worker.standing));
  }
  if (const auto missing = fleet_.adapters().not_there(unit.worker, at->adapters); missing > 0) {
    const std::string left =
        at->ready_us > now_us ? about(at->ready_us - now_us) + " more" : "which takes longer than predicted";
    return fmt::format("{} of its {} adapter{} to be loaded on {}, {}", missing, at->adapters.size(),
                       at->adapters.size() == 1 ? "" : "s", worker.name, left);
  }
  const auto before = at - worker.held.begin();
  return before == 0 ? fmt::format("{} to start it", worker.name)
                     : fmt::format("{}, where {} unit{} before it", worker.name, before, before == 1 ? " is" : "s are");
}

}  // namespace ditfleet::scheduling
