// Scheduler: what a unit waits for, in words for the client.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "coordinator/scheduling/scheduler.h"
#include "shared/core/short_numbers.h"

namespace ditfleet::scheduling {
namespace {

std::string about(std::int64_t us) { return us < 1'000 ? "less than 1 ms" : "about " + short_duration(us); }

std::string workers(std::size_t n) { return fmt::format("{} worker{}", n, n == 1 ? "" : "s"); }

}  // namespace

std::string Scheduler::waits_for(const queue::UnitRef& ref, std::int64_t now_us) const {
  const auto* unit = jobs_.find_unit(ref);
  if (unit == nullptr) return {};
  switch (unit->where) {
    case Where::kQueued:
    case Where::kParked: return queued_waits_for(*unit, now_us);
    case Where::kAlone:
      return fmt::format("an empty worker: it runs alone, because {} lost with it",
                         unit->lapses == 1 ? "a worker was" : fmt::format("{} workers were", unit->lapses));
    case Where::kHeld: return held_waits_for(*unit, now_us);
    case Where::kDelayed:
      return is_late(unit->job, now_us) ? "nothing: its deadline has passed" : "its next attempt: the last one failed";
    case Where::kPaused: return "its job to be resumed";
    case Where::kPending:
    case Where::kUnknown:
    case Where::kEnded: break;
  }
  return {};
}

std::string Scheduler::queued_waits_for(const Unit& unit, std::int64_t now_us) const {
  const Job& job = unit.job;
  const auto& lane = jobs_.lanes()[unit.lane()];
  const auto needs = static_cast<int>(lane.adapters.size());
  const auto& model = jobs_.models()[job.model];
  const auto& having = fleet_.with_model(job.model);
  if (having.empty()) return fmt::format("a worker with the model '{}': no such worker is registered", model);
  if (const int most = fleet_.most_adapter_slots(job.model); needs > most) {
    if (most <= 0)
      return fmt::format("a worker with adapter slots: found {} with '{}', but none with adapter slots",
                         workers(having.size()), model);
    return fmt::format("a worker with {} adapter slots, one per adapter: workers with '{}' have at most {}", needs,
                       model, most);
  }
  const auto pixels = jobs_.needed_pixels(job.cls);
  if (const auto most = fleet_.most_pixels(job.model); pixels > most)
    return fmt::format("a worker with more memory: it has {} pixels, workers with '{}' can hold at most {}",
                       with_commas(pixels), model, with_commas(most));
  std::map<WorkerState, std::size_t> not_ready;
  std::size_t fitting = 0, ready = 0, narrow_open = 0, small_open = 0;  // narrow, small: fewer slots, less memory
  bool any_open = false;
  std::int64_t soonest_us = -1;
  for (const auto w : having) {
    const auto& worker = fleet_.at(w);
    const auto& load = fleet_.load(w);
    if (fleet_.adapters().slots(w) < needs) {
      narrow_open += load.ready && load.has_capacity();
      continue;
    }
    if (pixels > fleet_.room(job.model, w).max_pixels) {
      small_open += load.ready && load.has_capacity();
      continue;
    }
    ++fitting;
    if (!load.ready) {
      ++not_ready[worker.state == WorkerState::kReady ? WorkerState::kDraining : worker.state];  // it returns units
      continue;
    }
    ++ready;
    any_open |= load.has_capacity();
    const auto free_us = load.start_us(now_us) - now_us;
    soonest_us = soonest_us < 0 ? free_us : std::min(soonest_us, free_us);
  }
  const auto able = [&](std::size_t n) {
    return fmt::format("{} with '{}'", workers(n), model) +
           (narrow_open > 0 ? fmt::format(" and at least {} adapter slots", needs) : "") +
           (small_open > 0 ? fmt::format(" and memory for {} pixels", with_commas(pixels)) : "");
  };
  if (ready == 0) {
    std::string how;
    for (const auto& [state, n] : not_ready)
      how += fmt::format(", {} {} {}", n, n == 1 ? "is" : "are", worker_state_name(state));
    return fmt::format("a ready worker: of {}{}", able(fitting), how);
  }
  if (!any_open) {
    std::string out = fmt::format("capacity: {} {} full, the next is free in {}", able(ready),
                                  ready == 1 ? "is" : "are", about(soonest_us));
    if (narrow_open > 0)
      out += fmt::format("; {} with fewer slots {} not full", narrow_open, narrow_open == 1 ? "is" : "are");
    return out;
  }
  if (lane.skipped_round == round_ && lane.missing_us > 0) {
    return needs > 0 ? fmt::format("a full worker that has its adapters: loading them elsewhere takes longer ({})",
                                   about(lane.missing_us))
                     : fmt::format("a full worker that is warm for its class: another takes longer to prepare ({})",
                                   about(lane.missing_us));
  }
  return "its turn";
}

std::string Scheduler::held_waits_for(const Unit& unit, std::int64_t now_us) const {
  const auto& worker = fleet_.at(unit.worker);
  const auto at = std::find_if(worker.held.begin(), worker.held.end(),
                               [ref = unit.ref()](const HeldUnit& held) { return held.ref == ref; });
  if (at == worker.held.end() || at->started) return {};
  if (worker.returns_units(now_us)) {
    return fmt::format("its return from {}, which is {}", worker.name, worker_state_name(worker.state));
  }
  if (const auto missing = fleet_.adapters().unreported(unit.worker, at->adapters); missing > 0) {
    const std::string left =
        at->ready_us > now_us ? about(at->ready_us - now_us) + " more" : std::string("longer than predicted");
    return fmt::format("{} to load {} of {} adapter{}, {}", worker.name, missing, at->adapters.size(),
                       at->adapters.size() == 1 ? "" : "s", left);
  }
  const auto before = at - worker.held.begin();
  return before == 0 ? fmt::format("{} to start it", worker.name)
                     : fmt::format("{}, which runs {} other unit{} first", worker.name, before, before == 1 ? "" : "s");
}

}  // namespace ditfleet::scheduling
