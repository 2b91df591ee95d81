// What happens in a history: its jobs and its faults. A seed determines it; parts can be left out.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace ditfleet::history {

inline constexpr std::int64_t kLease = 1'500'000;  // of a unit; all times in microseconds

struct PlannedJob {
  // kFailsOnce: with an error that may be retried; kHangs: one step never ends, the first time.
  enum class Nature { kPlain, kFailsOnce, kFails, kHangs, kKillsWorkers };
  std::int64_t at = 0;
  Nature nature = Nature::kPlain;
  int units = 1, steps = 4;
  std::int64_t step = 0;
  int tenant = 0;
  bool has_key = false;                            // an idempotency key
  bool by_stream = false;                          // by XADD instead of a call
  std::int64_t cancel_after = 0, deadline_in = 0;  // 0: never
  std::int64_t pause_after = 0, resume_after = 0;  // its pause, 0: never; from then on
  std::string text() const;
};

struct PlannedFault {
  enum class Kind {
    kKillWorker,
    kKillCoordinator,
    kStopWorker,
    kStopCoordinator,
    kDrainWorker,
    kRestartCoordinator,
    kUpgrade,
    kCut,
    kLoseReplies,
    kSilence,
    kPartition,
    kHold,
    kStopRedis,
    kCrashRedis,
    kFailOver,
    kClockStep,
    kFillMemory,
    kSlowStore,
    kBrokenStore,
    kCount
  };
  std::int64_t at = 0, lasts = 0;
  Kind kind = Kind::kCut;
  int target = 0;  // a coordinator or worker, or any process
  std::string text() const;
};

struct Plan {
  // Leaves out the jobs and faults with these numbers.
  static Plan of(std::uint64_t seed, const std::set<int>& without_jobs = {}, const std::set<int>& without_faults = {});
  std::uint64_t seed = 0;
  int coordinators = 1, workers = 1, capacity = 2;
  bool replicated = false;  // a replica lags by up to `lag`
  std::int64_t lag = 0;
  std::int64_t checkpoint_every = 0;
  std::vector<PlannedJob> jobs;
  std::vector<PlannedFault> faults;
  int all_jobs = 0, all_faults = 0;  // of the seed
  bool has(PlannedFault::Kind kind) const;
  // Faults by which a worker can lose a unit that it holds.
  int losses() const;
  // Those after which a worker that was cut off may report it late.
  int cut_offs() const;
  // How many leases may lapse because of them.
  int lapses() const;
};

}  // namespace ditfleet::history
