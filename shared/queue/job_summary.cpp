#include "shared/queue/job_summary.h"

#include <algorithm>

#include "shared/job/shape_class.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

constexpr std::size_t kMaxUnits = 1024, kMostPhases = 32, kMostWorkers = 100'000;

std::int64_t number_in(const Event& event, const char* name) { return to_int(event.field(name)); }

JobSummary of_unit(const JobSummaries::Job& job, int index) {
  JobSummary out = job.summary;
  const auto& unit = job.units[static_cast<std::size_t>(index)];
  out.unit = index;
  out.state = unit.state;
  out.worker = unit.worker;
  out.attempts = unit.attempts;
  out.first_assigned_ms = unit.first_assigned_ms;
  out.assigned_ms = unit.assigned_ms;
  out.started_ms = unit.started_ms;
  out.earlier_ms = unit.earlier_ms;
  return out;
}

}  // namespace

std::string model_of_class(std::string_view class_key) {
  const auto shape = job::parse_class_key(class_key);
  return shape ? shape->model : std::string();
}

std::vector<Span> spans_of(const JobSummary& unit, std::int64_t now_ms) {
  static constexpr std::string_view kOrder[] = {"adapter", "text", "wait", "denoise", "vae", "encode", "store"};
  const std::int64_t until = unit.ended_ms > 0 ? unit.ended_ms : now_ms;
  std::vector<Span> spans;
  const auto add = [&](std::string name, std::int64_t from_ms, std::int64_t to_ms) {
    if (from_ms > 0 && to_ms >= from_ms)
      spans.push_back({std::move(name), (from_ms - unit.created_ms) * 1000, (to_ms - from_ms) * 1000});
  };
  const std::int64_t first = unit.first_assigned_ms > 0 ? unit.first_assigned_ms : unit.assigned_ms;
  add("admission", unit.created_ms, unit.ready_ms > 0 ? unit.ready_ms : until);
  add("queue", unit.ready_ms, first > 0 ? first : until);
  if (first > 0 && first != unit.assigned_ms) {
    const std::int64_t last = unit.assigned_ms > 0 ? unit.assigned_ms : until;
    const std::int64_t held_until = std::clamp(first + unit.earlier_ms, first, std::max(first, last));
    add("earlier attempts", first, held_until);
    add("queued again", held_until, last);
  }
  if (unit.assigned_ms <= 0) return spans;
  // The worker reports its phases at the end. They begin when it reads its mailbox, before `started`.
  std::int64_t in_phases = 0;
  const auto add_phase = [&](std::string_view name, std::int64_t us) {
    spans.push_back({std::string(name), (unit.assigned_ms - unit.created_ms) * 1000 + in_phases, us});
    in_phases += us;
  };
  for (const std::string_view name : kOrder) {
    if (const auto it = unit.phases_us.find(std::string(name)); it != unit.phases_us.end()) add_phase(name, it->second);
  }
  for (const auto& [name, us] : unit.phases_us) {
    if (std::find(std::begin(kOrder), std::end(kOrder), name) == std::end(kOrder)) add_phase(name, us);
  }
  if (in_phases == 0) {
    add(unit.started_ms > 0 ? "until started" : "not started", unit.assigned_ms,
        unit.started_ms > 0 ? unit.started_ms : until);
    add("run", unit.started_ms, until);
  } else if (const std::int64_t held = (unit.ended_ms - unit.assigned_ms) * 1000; held > in_phases) {
    add_phase("hand-over", held - in_phases);
  } else if (unit.ended_ms > 0) {  // times in milliseconds are cut off, so phases may seem to end a little later
    for (auto span = spans.rbegin(); span != spans.rend() && in_phases > held; ++span) {
      const std::int64_t cut = std::min(span->us, in_phases - held);
      span->us -= cut;
      in_phases -= cut;
    }
  }
  return spans;
}

JobSummaries::Job* JobSummaries::add(const std::string& id, std::int64_t created_ms) {
  if (const auto it = open_.find(id); it != open_.end()) return &it->second;
  if (full()) return nullptr;
  Job& job = open_[id];
  job.summary.id = id;
  job.summary.created_ms = created_ms;
  return &job;
}

const JobSummaries::Unit* JobSummaries::find(std::string_view job, int unit) const {
  const auto it = open_.find(job);
  const bool known = it != open_.end() && unit >= 0 && static_cast<std::size_t>(unit) < it->second.units.size();
  return known ? &it->second.units[static_cast<std::size_t>(unit)] : nullptr;
}

JobSummaries::Ended JobSummaries::apply(const Event& event) {
  Ended ended;
  const auto state = job::state_from_name(event.type);
  const bool started = event.type == "started";
  if (!state && !started) return ended;  // a step or a preview
  const bool admits = state == job::State::kReady && event.fields.contains("class");
  const auto found = open_.find(event.job);
  Job* job = found != open_.end()                     ? &found->second
             : admits || state == job::State::kQueued ? add(event.job, event.at_ms)
                                                      : nullptr;
  if (job == nullptr) return ended;
  JobSummary& whole = job->summary;
  if (const auto tenant = event.field("tenant"); !tenant.empty()) whole.tenant = tenant;
  if (admits) {
    whole.class_key = event.field("class");
    whole.model = model_of_class(whole.class_key);
    whole.units = static_cast<int>(std::clamp<std::int64_t>(number_in(event, "units"), 1, kMaxUnits));
    whole.steps = static_cast<int>(number_in(event, "steps"));
    whole.adapters = static_cast<int>(number_in(event, "adapters"));
    whole.cost_us = number_in(event, "cost_us");
    whole.ready_ms = event.at_ms;
    whole.state = job::State::kReady;
    job->units.resize(static_cast<std::size_t>(whole.units), Unit{.state = job::State::kReady, .worker = {}});
  }
  if (event.unit < 0) {
    if (!state || !job::is_terminal(*state)) return ended;
    if (whole.error.empty()) whole.error = event.field("message");
    whole.state = *state;
    whole.ended_ms = event.at_ms;
    ended.job = std::move(whole);
    open_.erase(event.job);
    return ended;
  }
  if (static_cast<std::size_t>(event.unit) >= job->units.size()) return ended;
  Unit& unit = job->units[static_cast<std::size_t>(event.unit)];
  unit.state = started ? job::State::kRunning : *state;
  if (started) {
    unit.started_ms = event.at_ms;
  } else if (*state == job::State::kAssigned) {
    unit.worker = event.field("worker");
    unit.attempts += 1;
    unit.assigned_ms = event.at_ms;
    unit.started_ms = 0;
    if (unit.first_assigned_ms == 0) unit.first_assigned_ms = event.at_ms;
  } else if (*state == job::State::kReady) {
    const std::string reason = event.field("reason");
    if (unit.attempts > 0 &&
        (reason == "handed back" || reason == "revoked" || (reason == "paused" && unit.assigned_ms > 0)))
      unit.attempts -= 1;
    if (reason == "paused") unit.state = job::State::kPaused;
    if (unit.assigned_ms > 0) unit.earlier_ms += event.at_ms - unit.assigned_ms;
    unit.assigned_ms = unit.started_ms = 0;
  } else if (job::is_terminal(*state)) {
    ended.unit = of_unit(*job, event.unit);
    ended.unit->ended_ms = event.at_ms;
    if (unit.started_ms > 0) {
      if (last_ends_ms_.size() >= kMostWorkers) last_ends_ms_.clear();
      std::int64_t& last_end_ms = last_ends_ms_[unit.worker];
      ended.unit->run_ms = event.at_ms - std::max(unit.started_ms, last_end_ms);
      last_end_ms = event.at_ms;
    }
    ended.unit->error = event.field("message");
    ended.unit->phases_us = parse_phases(event.field("phases_us"));
    while (ended.unit->phases_us.size() > kMostPhases) ended.unit->phases_us.erase(ended.unit->phases_us.begin());
    const int attempts = std::max(whole.attempts, unit.attempts);
    JobSummary last = *ended.unit;
    last.unit = -1;
    last.last_unit = event.unit;
    last.attempts = attempts;
    last.ended_ms = 0;
    if (last.error.empty()) last.error = whole.error;
    whole = std::move(last);
  }
  return ended;
}

void JobSummaries::set_adapter(std::string_view job, std::string digest) {
  if (const auto it = open_.find(job); it != open_.end()) it->second.summary.adapter = std::move(digest);
}

void JobSummaries::restore(const std::vector<UnitView>& units) {
  open_.clear();
  for (const UnitView& view : units) {
    if (view.ref.unit < 0 || view.ref.unit >= static_cast<int>(kMaxUnits)) continue;
    Job* job = add(view.ref.job, view.created_ms);
    if (job == nullptr) continue;
    JobSummary& whole = job->summary;
    whole.tenant = view.tenant;
    whole.class_key = view.class_key;
    whole.model = view.model;
    whole.steps = view.steps;
    whole.adapters = static_cast<int>(view.adapters.size());
    if (!view.adapters.empty()) whole.adapter = view.adapters.front();
    whole.cost_us = view.cost_us;
    whole.ready_ms = view.ready_ms;
    whole.state = job::State::kReady;
    whole.units = std::max(whole.units, view.ref.unit + 1);
    if (job->units.size() < static_cast<std::size_t>(whole.units))
      job->units.resize(static_cast<std::size_t>(whole.units));
    Unit& unit = job->units[static_cast<std::size_t>(view.ref.unit)];
    unit.state = view.state;
    unit.worker = worker_name(view.owner);
    unit.attempts = view.attempt;
  }
}

}  // namespace ditfleet::queue
