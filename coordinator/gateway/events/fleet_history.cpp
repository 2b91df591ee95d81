#include "coordinator/gateway/events/fleet_history.h"

#include <algorithm>
#include <utility>

namespace ditfleet::gateway {
namespace {

constexpr std::size_t kLeastSamples = 5;  // for a median that blames a phase

std::size_t phase_index(std::string_view name) {
  const auto& all = FleetHistory::kPhases;
  return static_cast<std::size_t>(std::find(all.begin(), all.end(), name) - all.begin());
}

bool slower(const queue::JobSummary& a, const queue::JobSummary& b) {
  return a.ended_ms - a.created_ms > b.ended_ms - b.created_ms;
}

// Keeps the element that was used last of each: removes the one with the smallest time.
template <class Map, class Time>
void evict_oldest(Map& map, std::size_t most, const Time& time) {
  if (map.size() < most) return;
  map.erase(std::min_element(map.begin(), map.end(),
                             [&](const auto& a, const auto& b) { return time(a.second) < time(b.second); }));
}

}  // namespace

void FleetHistory::apply(const queue::Event& event) {
  const auto state = job::state_from_name(event.type);
  const bool started = event.type == "started";
  if (!state && !started) return;
  if (started) {
    const auto worker = event.fields.find("worker");
    const auto job = jobs_.open().find(event.job);
    if (worker != event.fields.end()) {
      if (!runs_.contains(worker->second))
        evict_oldest(runs_, kMostWorkers, [](const auto& runs) { return runs.empty() ? 0 : runs.back().from_ms; });
      auto& runs = runs_[worker->second];
      runs.push_back({.job = event.job,
                      .tenant = job == jobs_.open().end() ? std::string() : job->second.summary.tenant,
                      .unit = event.unit,
                      .from_ms = event.at_ms,
                      .end = {}});
      if (runs.size() > kMostRuns) runs.pop_front();
    }
  } else if (const auto* unit = jobs_.find(event.job, event.unit); unit != nullptr && !unit->worker.empty()) {
    if (*state == job::State::kReady) close_run(unit->worker, event, "returned");
    if (job::is_terminal(*state)) close_run(unit->worker, event, job::state_name(*state));
  }
  const auto ended = jobs_.apply(event);
  if (ended.unit && ended.unit->state == job::State::kSucceeded) add_sample(*ended.unit);
  if (event.unit >= 0 || started || !job::is_terminal(*state)) return;
  const auto index = event.at_ms / kBucketMs;
  Bucket& bucket = buckets_[static_cast<std::size_t>(index) % kBuckets];
  if (bucket.index < index) bucket = {index, {}};
  const auto end = std::find(kEnds.begin(), kEnds.end(), *state);
  if (bucket.index == index) ++bucket.counts[static_cast<std::size_t>(end - kEnds.begin())];
  if (ended.job && *state != job::State::kCanceled && *state != job::State::kRejected) add_slow(*ended.job);
}

void FleetHistory::close_run(const std::string& worker, const queue::Event& event, std::string_view end) {
  const auto found = runs_.find(worker);
  if (found == runs_.end()) return;
  for (auto run = found->second.rbegin(); run != found->second.rend(); ++run) {
    if (run->to_ms != 0 || run->unit != event.unit || run->job != event.job) continue;
    run->to_ms = event.at_ms;
    run->end = end;
    return;
  }
}

FleetHistory::Class& FleetHistory::class_of(const std::string& key, std::int64_t now_ms) {
  if (!classes_.contains(key)) evict_oldest(classes_, kMostClasses, [](const Class& c) { return c.used_ms; });
  Class& out = classes_[key];
  out.used_ms = now_ms;
  return out;
}

void FleetHistory::add_sample(const queue::JobSummary& unit) {
  if (unit.class_key.empty() || unit.first_assigned_ms == 0) return;  // after restore() times are missing
  Class& into = class_of(unit.class_key, unit.ended_ms);
  Sample sample{.at_ms = unit.ended_ms, .us = {}};
  for (const auto& span : queue::spans_of(unit, unit.ended_ms)) {
    if (const auto at = phase_index(span.name); at < kTotal) sample.us[at] = span.us;
  }
  sample.us[kTotal] = (unit.ended_ms - unit.created_ms) * 1000;
  into.samples.push_back(sample);
  if (into.samples.size() > kMostSamples) into.samples.pop_front();
  into.times.reset();
}

void FleetHistory::add_slow(const queue::JobSummary& job) {
  auto& slow = class_of(job.class_key, job.ended_ms).slow;
  std::erase_if(slow, [&](const auto& old) { return old.ended_ms < job.ended_ms - kHourMs; });
  slow.insert(std::upper_bound(slow.begin(), slow.end(), job, slower), job);
  if (slow.size() > kMostSlow) slow.pop_back();
}

void FleetHistory::restore(const std::vector<queue::UnitView>& units, std::int64_t now_ms) {
  jobs_.restore(units);
  for (auto& [worker, runs] : runs_) {
    for (Run& run : runs) {
      const auto* unit = jobs_.find(run.job, run.unit);
      if (run.to_ms != 0 || (unit != nullptr && unit->worker == worker && unit->state == job::State::kRunning))
        continue;
      run.to_ms = now_ms;
      run.end = "unknown";
    }
  }
}

std::vector<std::array<std::uint32_t, FleetHistory::kEnds.size()>> FleetHistory::ended(std::int64_t now_ms) const {
  std::vector<std::array<std::uint32_t, kEnds.size()>> out(kBuckets);
  const auto first = now_ms / kBucketMs - static_cast<std::int64_t>(kBuckets) + 1;
  for (const Bucket& bucket : buckets_) {
    if (bucket.index >= first && bucket.index < first + static_cast<std::int64_t>(kBuckets))
      out[static_cast<std::size_t>(bucket.index - first)] = bucket.counts;
  }
  return out;
}

const FleetHistory::ClassTimes& FleetHistory::times_of(const std::string& key, Class& from, std::int64_t now_ms) {
  while (!from.samples.empty() && from.samples.front().at_ms < now_ms - kHourMs) {
    from.samples.pop_front();
    from.times.reset();
  }
  if (from.times) return *from.times;
  ClassTimes& out = from.times.emplace();
  out.name = key;
  out.units = from.samples.size();
  std::vector<std::int64_t> values;
  for (std::size_t phase = 0; phase < kPhases.size(); ++phase) {
    values.clear();
    for (const Sample& sample : from.samples) values.push_back(sample.us[phase]);
    std::sort(values.begin(), values.end());
    if (values.empty() || values.back() == 0) continue;
    const auto at = [&](std::size_t percent) { return values[(values.size() - 1) * percent / 100]; };
    out.phases[phase] = Percentiles{at(50), at(90), at(99)};
  }
  return out;
}

std::vector<FleetHistory::ClassTimes> FleetHistory::classes(std::int64_t now_ms) {
  std::vector<ClassTimes> out;
  for (auto& [key, one] : classes_) {
    if (const auto& times = times_of(key, one, now_ms); times.units > 0) out.push_back(times);
  }
  return out;
}

std::vector<FleetHistory::QueueRow> FleetHistory::queue_now() const {
  std::map<std::pair<std::string_view, std::string_view>, QueueRow> rows;
  for (const auto& [id, job] : jobs_.open()) {
    const auto& whole = job.summary;
    QueueRow& row = rows[{whole.model, whole.tenant}];
    bool waits = job.units.empty();
    if (waits) row.queued += 1;
    for (const auto& unit : job.units) {
      if (unit.state == job::State::kReady) row.ready += 1, waits = true;
      if (unit.state == job::State::kAssigned) row.assigned += 1;
      if (unit.state == job::State::kRunning) row.running += 1;
    }
    if (waits && (row.oldest_ms == 0 || whole.created_ms < row.oldest_ms)) row.oldest_ms = whole.created_ms;
  }
  std::vector<QueueRow> out;
  for (auto& [key, row] : rows) {
    row.model = key.first;
    row.tenant = key.second;
    out.push_back(std::move(row));
  }
  return out;
}

const std::map<std::string, std::deque<FleetHistory::Run>, std::less<>>& FleetHistory::runs(std::int64_t now_ms) {
  for (auto it = runs_.begin(); it != runs_.end();) {
    auto& runs = it->second;
    while (!runs.empty() && runs.front().to_ms != 0 && runs.front().to_ms < now_ms - kRunsMs) runs.pop_front();
    it = runs.empty() ? runs_.erase(it) : std::next(it);
  }
  return runs_;
}

std::vector<queue::JobSummary> FleetHistory::slow(std::string_view tenant, std::string_view class_key,
                                                  std::size_t limit, std::int64_t now_ms) const {
  std::vector<queue::JobSummary> out;
  for (const auto& [key, one] : classes_) {
    if (!class_key.empty() && key != class_key) continue;
    std::copy_if(one.slow.begin(), one.slow.end(), std::back_inserter(out), [&](const auto& job) {
      return job.ended_ms >= now_ms - kHourMs && (tenant.empty() || job.tenant == tenant);
    });
  }
  std::sort(out.begin(), out.end(), slower);
  if (out.size() > limit) out.resize(limit);
  return out;
}

std::vector<FleetHistory::Blame> FleetHistory::blame(std::string_view class_key, const std::vector<queue::Span>& spans,
                                                     std::int64_t now_ms) {
  const auto found = classes_.find(class_key);
  if (found == classes_.end()) return {};
  const ClassTimes& times = times_of(found->first, found->second, now_ms);
  if (times.units < kLeastSamples) return {};
  std::vector<Blame> out;
  std::int64_t whole = 0;
  for (const auto& span : spans) {
    whole += span.us;
    const auto at = phase_index(span.name);
    if (at >= kTotal) continue;
    const std::int64_t median = times.phases[at] ? (*times.phases[at])[0] : 0;
    if (span.us > median) out.push_back({span.name, span.us, median});
  }
  const auto over = [](const Blame& b) { return b.us - b.median_us; };
  std::sort(out.begin(), out.end(), [&](const Blame& a, const Blame& b) { return over(a) > over(b); });
  if (out.empty()) return out;
  out.erase(std::remove_if(out.begin() + 1, out.end(),
                           [&](const Blame& b) { return over(b) < b.median_us / 2 || over(b) < whole / 100; }),
            out.end());
  return out;
}

}  // namespace ditfleet::gateway
