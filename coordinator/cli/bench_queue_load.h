// The load of `ditfleet bench queue` on one shard: producers, a scheduler and null workers, all through
// queue::Client, on one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shared/core/result.h"
#include "shared/queue/client.h"

namespace ditfleet::cli {

struct LoadOptions {
  std::string redis_url;
  queue::QueueOptions queue;
  int batch = 64, workers = 4, window = 4096, producers = 4;
  double seconds = 0;     // stop submitting after so long; 0: only by `jobs`
  std::int64_t jobs = 0;  // stop submitting after so many; 0: only by time
  double rate = 0;        // jobs a second to submit at; 0: as fast as the window allows
  // Called on the load's thread when so many jobs have finished.
  std::vector<std::int64_t> marks;
  std::function<void(std::int64_t)> on_mark;
  const std::atomic<bool>* stop = nullptr;  // once it is true, the load ends where it is
};

struct LoadResult {
  std::int64_t finished = 0;
  double seconds = 0;                        // first submission to last completion
  std::vector<double> submit_to_started_us;  // one a job; only of paced loads
  double client_cpu_seconds = 0;             // of this thread
  std::int64_t feed_events = 0;              // what the scheduler's follower received
};

// Runs until every submitted job has succeeded, then checks what is left in Redis: nothing open, and of a
// sample of jobs every event in order. kInternal says what was wrong; kCanceled: it was stopped. Blocks; a thread of
// its own each.
Result<LoadResult> run_load(const LoadOptions& options);

}  // namespace ditfleet::cli
