// Short records of jobs and units, for histories and statistics, and how their time divides into spans.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shared/queue/types.h"

namespace ditfleet::queue {

// One unit, or a whole job. The worker, the phases and the times from first_assigned_ms to started_ms of a job are
// those of the unit that ended last. Times are 0 and texts empty while unknown.
struct JobSummary {
  std::string id;
  int unit = -1;  // -1: the whole job
  std::string tenant, class_key, model, worker;
  std::string error;  // message
  job::State state = job::State::kQueued;
  int units = 1, steps = 0, adapters = 0;  // of the job; adapters: how many a unit needs
  int last_unit = -1;                      // of a job: the unit that ended last
  // Failed and lost attempts, and the current one. Units that were handed back or revoked do not count. Of a job the
  // largest number of one of its units.
  int attempts = 0;
  std::int64_t cost_us = 0;  // predicted, per unit
  std::int64_t created_ms = 0, ready_ms = 0, first_assigned_ms = 0, assigned_ms = 0, started_ms = 0, ended_ms = 0;
  std::int64_t earlier_ms = 0;  // how long workers had the unit in earlier attempts, also in those handed back
  // From `started` to the end of the unit, or of the job's unit that ended last; without the time in which the worker
  // still ran the unit before. 0: it did not start, or events are missing.
  std::int64_t run_ms = 0;
  std::map<std::string, std::int64_t> phases_us;  // reported by the worker
  std::string adapter;                            // digest of its first adapter; only after restore() or set_adapter()
};

struct Span {
  std::string name;
  std::int64_t begin_us = 0, us = 0;  // begin_us: since the job was created
};

// The spans of a unit in order of time, without gaps: "admission", "queue" (until the first assignment), "earlier
// attempts" (while workers had the unit) and "queued again" (the time between attempts) as one span each, then the
// worker's phases and "hand-over", the rest of the last attempt. While there are no phases, "until started" (or "not
// started") and "run". The last span of an open unit ends at `now_ms`.
std::vector<Span> spans_of(const JobSummary& unit, std::int64_t now_ms);

std::string model_of_class(std::string_view class_key);  // the model in a class key; empty if there is none

// Builds summaries from the events of a shard, in the order of the feed. Not thread-safe.
class JobSummaries {
 public:
  struct Unit {
    job::State state = job::State::kQueued;
    std::string worker;  // of the latest assignment
    int attempts = 0;
    std::int64_t first_assigned_ms = 0, assigned_ms = 0, started_ms = 0, earlier_ms = 0;
  };
  struct Job {
    JobSummary summary;       // what is known of the job as a whole
    std::vector<Unit> units;  // empty until it is admitted
  };
  struct Ended {
    std::optional<JobSummary> unit, job;
  };

  // Tracks at most `most_jobs` open jobs; later jobs are ignored until others end.
  explicit JobSummaries(std::size_t most_jobs = 50'000) : most_jobs_(most_jobs) {}

  // Returns the summary of a unit or a job that ends with this event, if it is tracked.
  Ended apply(const Event& event);
  // The events have only the number of adapters. Does nothing for a job that is not tracked.
  void set_adapter(std::string_view job, std::string digest);
  // Replaces the open jobs with those that Client::open_units() returned, after events were missed. Their assignments
  // are unknown.
  void restore(const std::vector<UnitView>& units);
  const std::map<std::string, Job, std::less<>>& open() const { return open_; }
  const Unit* find(std::string_view job, int unit) const;  // nullptr: unknown
  bool full() const { return open_.size() >= most_jobs_; }

 private:
  Job* add(const std::string& id, std::int64_t created_ms);

  std::size_t most_jobs_;
  std::map<std::string, Job, std::less<>> open_;
  std::map<std::string, std::int64_t> last_ends_ms_;  // of a unit, by worker
};

}  // namespace ditfleet::queue
