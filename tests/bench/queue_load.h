// The load of queue_bench on one shard: producers, a scheduler and workers that run nothing, on one thread. All of them
// call queue::Client as the product does. Producers and workers pass one job per call; many calls are outstanding on
// each connection. The scheduler admits and assigns what one read of the intake returned.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "shared/core/result.h"
#include "shared/queue/client.h"

namespace ditfleet::bench {

struct LoadOptions {
  std::string redis_url;
  queue::QueueOptions queue;
  int producers = 64;     // submit at the same time, on one connection
  int running = 64;       // units that run at the same time, on all workers together
  int workers = 4;        // each with a connection of its own
  int window = 1024;      // jobs that were submitted and have not ended, at most
  double seconds = 0;     // stops submitting after this time; 0: only by `jobs`
  std::int64_t jobs = 0;  // stops submitting after this many; 0: only by time
  double rate = 0;        // jobs submitted per second; 0: as fast as `window` allows
  // Called on the load's thread when this many jobs have finished.
  std::vector<std::int64_t> marks;
  std::function<void(std::int64_t)> on_mark;
};

struct LoadResult {
  std::int64_t finished = 0;
  double seconds = 0;                        // from the first submission to the last completion
  std::vector<double> submit_to_started_us;  // one per job; only if `rate` is set
  double client_cpu_seconds = 0;             // of this thread
  std::int64_t feed_events = 0;              // received by the scheduler's follower
};

// Runs until every submitted job has succeeded. Then it checks that the shard is empty and that a sample of jobs has
// every event in order. Blocks; run each load on a thread of its own. kInternal: the queue is in a wrong state.
Result<LoadResult> run_load(const LoadOptions& options);

}  // namespace ditfleet::bench
