#include "coordinator/gateway/events/fleet_history.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <unordered_map>
#include <utility>

#include "shared/telemetry/metrics.h"

namespace ditfleet::gateway {
namespace {

constexpr std::size_t kLeastSamples = 5;         // for a median that blames a phase
constexpr std::int64_t kLeastExcessUs = 50'000;  // less is noise
constexpr std::int64_t kExcessPart = 5;          // of the unit's time
constexpr std::size_t kLeastRuns = 4;            // for a worker's speed
constexpr std::size_t kLeastOtherRuns = 3;       // to compare a run with
constexpr double kLeastRunMs = 20;               // shorter runs are too coarse in milliseconds
constexpr double kSpeedWeight = 0.3;             // of the latest run
constexpr std::int64_t kSpeedsEveryMs = 1000;

std::size_t phase_index(std::string_view name) {
  const auto& all = FleetHistory::kPhases;
  return static_cast<std::size_t>(std::find(all.begin(), all.end(), name) - all.begin());
}

constexpr std::size_t kDenoise = 7, kFirstOnWorker = 4;
static_assert(FleetHistory::kPhases[kDenoise] == "denoise" && FleetHistory::kPhases[kFirstOnWorker] == "adapter");

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
  if (ended.unit) (void)verdict(*ended.unit, event.at_ms);  // keeps it
  if (ended.unit && ended.unit->state == job::State::kSucceeded) add_sample(*ended.unit);
  if (event.unit >= 0 || started || !job::is_terminal(*state)) return;
  progress_.erase(event.job);
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
  Sample sample{.at_ms = unit.ended_ms, .steps = std::max(1, unit.steps), .us = {}};
  for (const auto& span : queue::spans_of(unit, unit.ended_ms)) {
    if (const auto at = phase_index(span.name); at < kTotal)
      sample.us[at] = at == kDenoise ? span.us / sample.steps : span.us;
  }
  sample.us[kTotal] = (unit.ended_ms - unit.created_ms) * 1000;
  const auto took = [&](std::string_view phase) { return static_cast<double>(sample.us[phase_index(phase)]); };
  if (const double step_us = took("denoise"); step_us > 0 && unit.steps > 0 && unit.run_ms > 0) {
    const double weight = into.pace.step_us > 0 ? 0.3 : 1;
    const double rest_us = std::max(0.0, 1e3 * static_cast<double>(unit.run_ms) - unit.steps * step_us);
    into.pace.step_us += weight * (step_us - into.pace.step_us);
    into.pace.rest_us += weight * (rest_us - into.pace.rest_us);
  }
  into.samples.push_back(sample);
  if (into.samples.size() > kMostSamples) into.samples.pop_front();
  into.times.reset();
  if (unit.run_ms <= 0) return;
  if (!timed_.contains(unit.worker))
    evict_oldest(timed_, kMostWorkers, [](const auto& runs) { return runs.back().at_ms; });
  auto& runs = timed_[unit.worker];
  runs.push_back({unit.class_key + "|" + std::to_string(unit.steps), unit.ended_ms, unit.run_ms});
  if (runs.size() > kMostTimed) runs.pop_front();
}

void FleetHistory::add_slow(const queue::JobSummary& job) {
  auto& slow = class_of(job.class_key, job.ended_ms).slow;
  std::erase_if(slow, [&](const auto& old) { return old.ended_ms < job.ended_ms - kHourMs; });
  slow.insert(std::upper_bound(slow.begin(), slow.end(), job, slower), job);
  if (slow.size() > kMostSlow) slow.pop_back();
}

void FleetHistory::restore(const std::vector<queue::UnitView>& units, std::int64_t now_ms) {
  jobs_.restore(units);
  std::erase_if(progress_, [this](const auto& entry) { return !jobs_.open().contains(entry.first); });
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
                                                  std::size_t limit, std::int64_t now_ms,
                                                  std::int64_t within_ms) const {
  std::vector<queue::JobSummary> out;
  for (const auto& [key, one] : classes_) {
    if (!class_key.empty() && key != class_key) continue;
    std::copy_if(one.slow.begin(), one.slow.end(), std::back_inserter(out), [&](const auto& job) {
      return job.ended_ms >= now_ms - within_ms && (tenant.empty() || job.tenant == tenant);
    });
  }
  std::sort(out.begin(), out.end(), slower);
  if (out.size() > limit) out.resize(limit);
  return out;
}

FleetHistory::Verdict FleetHistory::verdict(const queue::JobSummary& unit, std::int64_t now_ms) {
  if (unit.ended_ms == 0) return judge(unit, now_ms);
  if (unit.first_assigned_ms == 0 && !unit.worker.empty()) return {};  // after restore() times are missing
  const auto [kept, added] = verdicts_.try_emplace({unit.id, unit.unit < 0 ? unit.last_unit : unit.unit});
  if (added) {
    kept->second = judge(unit, now_ms);
    verdict_order_.push_back(kept->first);
    if (verdict_order_.size() > kMostVerdicts) {
      verdicts_.erase(verdict_order_.front());
      verdict_order_.pop_front();
    }
  } else if (!kept->second.speed) {
    kept->second.speed = slowness(unit, now_ms);
  }
  return kept->second;
}

// Runs that ended before those that count say nothing about the worker of today.
std::optional<double> FleetHistory::slowness(const queue::JobSummary& unit, std::int64_t now_ms) {
  const auto& all = speeds(now_ms);
  const auto found = all.find(unit.worker);
  if (found == all.end() || found->second.ratio >= kSlow) return std::nullopt;
  return unit.ended_ms == 0 || unit.ended_ms >= found->second.since_ms ? std::optional(found->second.ratio)
                                                                       : std::nullopt;
}

FleetHistory::Verdict FleetHistory::judge(const queue::JobSummary& unit, std::int64_t now_ms) {
  const auto found = classes_.find(unit.class_key);
  const ClassTimes* times = found == classes_.end() ? nullptr : &times_of(found->first, found->second, now_ms);
  if (times != nullptr && times->units < kLeastSamples) times = nullptr;
  const std::int64_t whole_us = ((unit.ended_ms > 0 ? unit.ended_ms : now_ms) - unit.created_ms) * 1000;
  const std::int64_t least_us = std::max(kLeastExcessUs, whole_us / kExcessPart);
  Verdict out;
  const auto compare = [&](std::string phase, std::int64_t us, std::int64_t expected_us, std::string than,
                           bool on_worker) {
    if (us - expected_us >= least_us)
      out.over.push_back({std::move(phase), us, expected_us, std::move(than), on_worker});
  };
  std::int64_t run_us = 0;
  for (const auto& span : queue::spans_of(unit, now_ms)) {
    const auto at = phase_index(span.name);
    const bool on_worker = at >= kFirstOnWorker, waits = !on_worker || span.name == "wait";
    if (times != nullptr && at < kTotal) {
      const std::int64_t typical = times->phases[at] ? (*times->phases[at])[0] : 0;
      const int steps = at == kDenoise ? std::max(1, unit.steps) : 0;
      compare(span.name, span.us, typical * std::max(1, steps),
              "the median of its class" + (steps > 0 ? " for " + std::to_string(steps) + " steps" : ""), on_worker);
    } else if (waits) {
      compare(span.name, span.us, 0, "in an idle fleet", on_worker);
    } else if (span.name != "not started" && span.name != "until started" && span.name != "hand-over") {
      // Without phases a run begins while the worker still runs the unit before.
      run_us += span.name == "run" && unit.run_ms > 0 ? unit.run_ms * 1000 : span.us;
    }
  }
  if (unit.ended_ms > 0 && run_us > 0 && unit.cost_us > 0) compare("run", run_us, unit.cost_us, "predicted", true);
  std::stable_sort(out.over.begin(), out.over.end(),
                   [](const Blame& a, const Blame& b) { return a.us - a.expected_us > b.us - b.expected_us; });
  if (unit.ended_ms == 0 || !out.over.empty()) out.speed = slowness(unit, now_ms);  // too costly for each unit
  return out;
}

const std::map<std::string, FleetHistory::Speed, std::less<>>& FleetHistory::speeds(std::int64_t now_ms) {
  if (std::abs(now_ms - speeds_ms_) < kSpeedsEveryMs) return speeds_;
  static const telemetry::Gauges gauge("ditfleet_worker_speed_ratio");
  for (const auto& [worker, unused] : speeds_) gauge({worker}).Set(std::nan(""));  // until it is known again
  speeds_ms_ = now_ms;
  speeds_.clear();
  struct Rate {
    double per_ms = 0;
    std::size_t runs = 0;
  };
  struct Kind {
    std::map<std::string_view, Rate> rates;  // by worker
    std::size_t runs = 0;
    double typical = 0;
  };
  // A mean of speeds, so that one slow run does not weigh more than several fast ones.
  std::unordered_map<std::string_view, Kind> kinds;
  for (auto& [worker, runs] : timed_) {
    while (!runs.empty() && runs.front().at_ms < now_ms - kHourMs) runs.pop_front();
    for (const Timed& run : runs) {
      Kind& kind = kinds[run.kind];
      Rate& rate = kind.rates[worker];
      const double weight = rate.runs++ == 0 ? 1 : kSpeedWeight;
      rate.per_ms += weight * (1 / static_cast<double>(run.run_ms) - rate.per_ms);
      ++kind.runs;
    }
  }
  for (auto& [name, kind] : kinds) {
    std::vector<double> rates;
    for (const auto& [worker, rate] : kind.rates) rates.push_back(rate.per_ms);
    const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);  // of two the faster one
    std::nth_element(rates.begin(), middle, rates.end());
    kind.typical = *middle;
  }
  for (const auto& [worker, runs] : timed_) {
    Speed speed;
    std::size_t counted = 0;
    for (const Timed& run : runs) {
      const Kind& kind = kinds[run.kind];
      if (kind.runs - kind.rates.at(worker).runs < kLeastOtherRuns || kind.typical * kLeastRunMs > 1) continue;
      const double ratio = 1 / (static_cast<double>(run.run_ms) * kind.typical);
      if (counted++ == 0) speed = {ratio, run.at_ms};
      speed.ratio += kSpeedWeight * (ratio - speed.ratio);
    }
    if (counted < kLeastRuns) continue;
    speeds_[worker] = speed;
    gauge({worker}).Set(speed.ratio);
  }
  std::erase_if(timed_, [](const auto& runs) { return runs.second.empty(); });
  return speeds_;
}

std::optional<double> FleetHistory::speed_of(std::string_view worker, std::int64_t now_ms) {
  const auto& all = speeds(now_ms);
  const auto found = all.find(worker);
  return found == all.end() ? std::nullopt : std::optional(found->second.ratio);
}

const FleetHistory::Pace* FleetHistory::pace(std::string_view class_key) const {
  const auto found = classes_.find(class_key);
  return found == classes_.end() || found->second.pace.step_us == 0 ? nullptr : &found->second.pace;
}

double FleetHistory::rising(const std::string& job, double progress) {
  if (!jobs_.open().contains(job)) return progress;
  double& shown = progress_[job];
  return shown = std::max(shown, progress);
}

}  // namespace ditfleet::gateway
