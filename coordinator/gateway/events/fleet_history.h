// What the fleet did in the last hour, from the events of the shard, in bounded memory: ended jobs, durations of
// phases, slow jobs, runs and speeds of workers. Also the work that waits now. Starts empty with the process. Not
// thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shared/queue/job_summary.h"

namespace ditfleet::gateway {

class FleetHistory {
 public:
  static constexpr std::int64_t kHourMs = 3'600'000, kBucketMs = 10'000, kRunsMs = 600'000;
  static constexpr std::size_t kBuckets = kHourMs / kBucketMs;
  static constexpr std::size_t kMostClasses = 64, kMostSamples = 512, kMostSlow = 50, kMostWorkers = 1024,
                               kMostRuns = 40, kMostTimed = 16, kMostVerdicts = 50'000;
  static constexpr double kSlow = 0.5;  // a worker at less than this speed is to blame for what runs there
  static constexpr std::array<job::State, 5> kEnds = {
      job::State::kSucceeded, job::State::kFailed, job::State::kCanceled, job::State::kExpired, job::State::kRejected};
  // Spans with percentiles. "denoise" is the time of a step. "total" is the time from the job's creation to the unit's
  // end.
  static constexpr std::array<std::string_view, 13> kPhases = {
      "admission", "queue", "earlier attempts", "queued again", "adapter",   "text", "wait",
      "denoise",   "vae",   "encode",           "store",        "hand-over", "total"};
  static constexpr std::size_t kTotal = kPhases.size() - 1;

  using Percentiles = std::array<std::int64_t, 3>;  // p50, p90, p99 in microseconds
  struct ClassTimes {
    std::string name;
    std::size_t units = 0;                                          // in the sample: the latest kMostSamples
    std::array<std::optional<Percentiles>, kPhases.size()> phases;  // of all units; none: no unit had it
  };
  struct QueueRow {
    std::string model, tenant;                                      // model: empty until jobs are admitted
    std::int64_t queued = 0, ready = 0, assigned = 0, running = 0;  // units
    std::int64_t oldest_ms = 0;                                     // creation of the oldest job that waits; 0: none
  };
  // A started attempt that ended in the last 10 minutes or runs.
  struct Run {
    std::string job, tenant;
    int unit = 0;
    std::int64_t from_ms = 0, to_ms = 0;  // to_ms 0: it runs
    std::string_view end;                 // "succeeded", … "returned" to the queue, "unknown"; empty: it runs
  };
  // A span that takes longer than it should.
  struct Blame {
    std::string phase;
    std::int64_t us = 0, expected_us = 0;
    std::string than;        // what expected_us is: "the median of its class"
    bool on_worker = false;  // the worker's speed matters
  };
  struct Verdict {
    std::vector<Blame> over;      // the largest excess first
    std::optional<double> speed;  // of the unit's worker, if it is below kSlow
  };
  // What units of the same class and number of steps take on the workers of the fleet, divided by what they take here.
  struct Speed {
    double ratio = 1;
    std::int64_t since_ms = 0;  // the end of the first run that counts
  };

  // Means of the latest runs of a class: a denoising step, and what follows the last one.
  struct Pace {
    double step_us = 0, rest_us = 0;
  };

  // Events in the order of the feed.
  void apply(const queue::Event& event);
  // After events were missed: the units that are open now.
  void restore(const std::vector<queue::UnitView>& units, std::int64_t now_ms);

  // Counts by kEnds of each bucket in the hour before `now_ms`, oldest first; the last bucket is incomplete.
  std::vector<std::array<std::uint32_t, kEnds.size()>> ended(std::int64_t now_ms) const;
  std::vector<ClassTimes> classes(std::int64_t now_ms);
  std::vector<QueueRow> queue_now() const;
  const std::map<std::string, std::deque<Run>, std::less<>>& runs(std::int64_t now_ms);  // by worker, oldest first
  // The slowest jobs, slowest first. An empty tenant or class matches any. `within_ms`: only jobs that ended since, of
  // the kMostSlow slowest of each class in the hour.
  std::vector<queue::JobSummary> slow(std::string_view tenant, std::string_view class_key, std::size_t limit,
                                      std::int64_t now_ms, std::int64_t within_ms = kHourMs) const;
  // The spans that exceed what they should take by 20 % of the unit's time and by 50 ms. Denoising should take the
  // class's median of a step, other spans their medians. Without enough units of the class, the run should take the
  // predicted time, and no span should wait. The spans of an ended unit are judged once: when it ends, or else when
  // this is first called. Its worker's speed is added once known.
  Verdict verdict(const queue::JobSummary& unit, std::int64_t now_ms);
  // By worker. Missing: fewer than four recent runs that can be compared with those of other workers.
  const std::map<std::string, Speed, std::less<>>& speeds(std::int64_t now_ms);
  std::optional<double> speed_of(std::string_view worker, std::int64_t now_ms);
  const Pace* pace(std::string_view class_key) const;  // null: no run was seen
  // The largest value so far for this open job: a retry or a new mean does not make its progress fall.
  double rising(const std::string& job, double progress);
  bool complete() const { return !jobs_.full(); }  // else queue_now() lacks jobs

 private:
  struct Bucket {
    std::int64_t index = -1;
    std::array<std::uint32_t, kEnds.size()> counts{};
  };
  struct Sample {
    std::int64_t at_ms = 0;
    int steps = 0;
    std::array<std::int64_t, kPhases.size()> us{};  // 0: it had no such span
  };
  struct Timed {
    std::string kind;  // class and steps
    std::int64_t at_ms = 0, run_ms = 0;
  };
  using VerdictKey = std::pair<std::string, int>;  // job, unit
  struct Class {
    std::int64_t used_ms = 0;
    Pace pace;  // step_us 0: none
    std::deque<Sample> samples;
    std::vector<queue::JobSummary> slow;  // the slowest jobs, slowest first
    std::optional<ClassTimes> times;      // of `samples`; none: must be computed
  };

  Class& class_of(const std::string& key, std::int64_t now_ms);
  const ClassTimes& times_of(const std::string& key, Class& from, std::int64_t now_ms);
  void add_sample(const queue::JobSummary& unit);
  void add_slow(const queue::JobSummary& job);
  Verdict judge(const queue::JobSummary& unit, std::int64_t now_ms);
  std::optional<double> slowness(const queue::JobSummary& unit, std::int64_t now_ms);
  void close_run(const std::string& worker, const queue::Event& event, std::string_view end);

  queue::JobSummaries jobs_;
  std::array<Bucket, kBuckets> buckets_;
  std::map<std::string, Class, std::less<>> classes_;
  std::map<std::string, std::deque<Run>, std::less<>> runs_;
  std::map<std::string, std::deque<Timed>, std::less<>> timed_;  // latest runs by worker
  std::map<std::string, Speed, std::less<>> speeds_;             // of timed_ at speeds_ms_
  std::int64_t speeds_ms_ = 0;
  std::map<VerdictKey, Verdict> verdicts_;
  std::deque<VerdictKey> verdict_order_;    // oldest first
  std::map<std::string, double> progress_;  // of open jobs, as rising() returned it
};

}  // namespace ditfleet::gateway
