// What the fleet did in the last hour, from the events of the shard, in bounded memory: ended jobs, durations of
// phases, slow jobs, runs of workers. Also the work that waits now. Starts empty with the process. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/queue/job_summary.h"

namespace ditfleet::gateway {

class FleetHistory {
 public:
  static constexpr std::int64_t kHourMs = 3'600'000, kBucketMs = 10'000, kRunsMs = 600'000;
  static constexpr std::size_t kBuckets = kHourMs / kBucketMs;
  static constexpr std::size_t kMostClasses = 64, kMostSamples = 512, kMostSlow = 50, kMostWorkers = 1024,
                               kMostRuns = 40;
  static constexpr std::array<job::State, 5> kEnds = {
      job::State::kSucceeded, job::State::kFailed, job::State::kCanceled, job::State::kExpired, job::State::kRejected};
  // Spans with percentiles. "total" is the time from the job's creation to the unit's end.
  static constexpr std::array<std::string_view, 12> kPhases = {"admission", "queue", "tried before", "adapter",
                                                               "text",      "wait",  "denoise",      "vae",
                                                               "encode",    "store", "hand-over",    "total"};
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
  // A span that exceeds the median of its class.
  struct Blame {
    std::string phase;
    std::int64_t us = 0, median_us = 0;
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
  // The slowest jobs, slowest first. An empty tenant or class matches any.
  std::vector<queue::JobSummary> slow(std::string_view tenant, std::string_view class_key, std::size_t limit,
                                      std::int64_t now_ms) const;
  // The span that exceeds its median most, then those that exceed theirs by half and by 1 % of all spans. Empty without
  // enough units of the class. `spans`: of spans_of().
  std::vector<Blame> blame(std::string_view class_key, const std::vector<queue::Span>& spans, std::int64_t now_ms);
  bool complete() const { return !jobs_.full(); }  // else queue_now() lacks jobs

 private:
  struct Bucket {
    std::int64_t index = -1;
    std::array<std::uint32_t, kEnds.size()> counts{};
  };
  struct Sample {
    std::int64_t at_ms = 0;
    std::array<std::int64_t, kPhases.size()> us{};  // 0: it had no such span
  };
  struct Class {
    std::int64_t used_ms = 0;
    std::deque<Sample> samples;
    std::vector<queue::JobSummary> slow;  // the slowest jobs, slowest first
    std::optional<ClassTimes> times;      // of `samples`; none: must be computed
  };

  Class& class_of(const std::string& key, std::int64_t now_ms);
  const ClassTimes& times_of(const std::string& key, Class& from, std::int64_t now_ms);
  void add_sample(const queue::JobSummary& unit);
  void add_slow(const queue::JobSummary& job);
  void close_run(const std::string& worker, const queue::Event& event, std::string_view end);

  queue::JobSummaries jobs_;
  std::array<Bucket, kBuckets> buckets_;
  std::map<std::string, Class, std::less<>> classes_;
  std::map<std::string, std::deque<Run>, std::less<>> runs_;
};

}  // namespace ditfleet::gateway
