#include "tests/history/plan.h"

#include <algorithm>

#include "tests/history/world.h"

namespace ditfleet::history {
namespace {

using Kind = PlannedFault::Kind;

constexpr const char* kKinds[] = {
    "kill worker",         "kill coordinator",     "stop worker",        "stop coordinator", "drain worker",
    "restart coordinator", "upgrade the library",  "cut connections of", "lose replies to",  "silence connections of",
    "partition",           "hold packets of",      "stop Redis",         "crash Redis",      "fail over Redis",
    "step clock of Redis", "fill memory of Redis", "slow store",         "broken store"};
static_assert(std::size(kKinds) == static_cast<std::size_t>(Kind::kCount));

std::string ms(std::int64_t us) { return std::to_string(us / kMs) + " ms"; }

}  // namespace

std::string PlannedJob::text() const {
  static constexpr const char* kNatures[] = {"plain", "fails once", "fails", "hangs once", "kills workers"};
  return "at " + ms(at) + ": " + kNatures[static_cast<int>(nature)] + ", " + std::to_string(units) + " units of " +
         std::to_string(steps) + " steps of " + ms(step) + ", tenant " + std::to_string(tenant) +
         (has_key ? ", with a key" : "") + (by_stream ? ", by XADD" : "") +
         (cancel_after > 0 ? ", canceled after " + ms(cancel_after) : "") +
         (deadline_in > 0 ? ", deadline in " + ms(deadline_in) : "") +
         (pause_after > 0 ? ", paused after " + ms(pause_after) + " for " + ms(resume_after) : "");
}

std::string PlannedFault::text() const {
  return "at " + ms(at) + ": " + kKinds[static_cast<int>(kind)] + " " + std::to_string(target) + ", lasts " + ms(lasts);
}

Plan Plan::of(std::uint64_t seed, const std::set<int>& without_jobs, const std::set<int>& without_faults) {
  Random random(seed * 2 + 1);
  Plan plan;
  plan.seed = seed;
  plan.coordinators = random.chance(60) ? 2 : 1;
  plan.workers = static_cast<int>(random.between(1, 3));
  plan.capacity = static_cast<int>(random.between(1, 3));
  plan.lag = random.between(1, 800) * kMs;
  plan.checkpoint_every = random.chance(60) ? random.between(50, 500) * kMs : 0;

  plan.all_jobs = static_cast<int>(random.between(1, 6));
  for (int i = 0; i < plan.all_jobs; ++i) {
    PlannedJob job;
    job.at = random.between(0, 1000) * kMs;
    const auto nature = random.below(100);
    job.nature = nature < 80   ? PlannedJob::Nature::kPlain
                 : nature < 88 ? PlannedJob::Nature::kFailsOnce
                 : nature < 93 ? PlannedJob::Nature::kFails
                 : nature < 96 ? PlannedJob::Nature::kHangs
                               : PlannedJob::Nature::kKillsWorkers;
    job.units = random.chance(70) ? 1 : static_cast<int>(random.between(2, 4));
    job.steps = static_cast<int>(random.between(1, 8));
    job.step = random.between(5, 200) * kMs;
    job.tenant = static_cast<int>(random.below(3));
    job.has_key = random.chance(40);
    job.by_stream = random.chance(15);
    if (random.chance(20)) job.cancel_after = random.between(1, 2000) * kMs;
    if (random.chance(8)) job.deadline_in = random.between(200, 2500) * kMs;
    if (job.cancel_after == 0 && random.chance(20)) {
      job.pause_after = random.between(1, 1500) * kMs;
      job.resume_after = random.between(1, 1500) * kMs;
    }
    if (!without_jobs.contains(i)) plan.jobs.push_back(job);
  }

  // A seed prefers some kinds of faults, so that some histories have many of one kind and none of others.
  int weights[static_cast<int>(Kind::kCount)];
  int sum = 0;
  for (int& weight : weights) sum += weight = random.chance(50) ? static_cast<int>(random.between(1, 9)) : 0;
  plan.all_faults = sum == 0 ? 0 : static_cast<int>(random.below(6));
  for (int i = 0; i < plan.all_faults; ++i) {
    PlannedFault fault;
    auto drawn = random.below(sum);
    int kind = 0;
    while (drawn >= weights[kind]) drawn -= weights[kind++];
    fault.kind = static_cast<Kind>(kind);
    fault.at = random.between(100, 2000) * kMs;
    fault.target = static_cast<int>(random.below(16));
    const bool brief = random.chance(50);
    fault.lasts = (brief ? random.between(1, 400) : random.between(400, 3000)) * kMs;
    if (!without_faults.contains(i)) plan.faults.push_back(fault);
  }
  plan.replicated = plan.has(Kind::kFailOver);
  return plan;
}

int Plan::lapses() const {
  // Its units, one that is finishing, and as many again until the scheduler notices.
  const int held = 2 * (capacity + 1);
  const bool cut_off = std::any_of(faults.begin(), faults.end(), [](const PlannedFault& fault) {
    return fault.kind >= Kind::kCut && fault.kind <= Kind::kCrashRedis;
  });
  std::int64_t replies_lost = 0;
  for (const auto& fault : faults) replies_lost += fault.kind == Kind::kLoseReplies ? fault.lasts : 0;
  int count = 0;
  for (const auto& fault : faults) {
    // A worker renews every 300 ms, and gives up a silent connection after three calls of half a second.
    const bool longer = fault.lasts > 700 * kMs;
    switch (fault.kind) {
      case Kind::kKillWorker: count += held; break;
      case Kind::kDrainWorker: count += cut_off ? held : 0; break;  // its farewell may not arrive
      case Kind::kStopWorker:
      case Kind::kHold: count += longer ? held : 0; break;
      case Kind::kLoseReplies: count += replies_lost > kLease ? held : 0; break;  // each call of a lease may fail
      case Kind::kPartition:
      case Kind::kSilence: count += held; break;
      case Kind::kFailOver:
      case Kind::kClockStep: count += 2 * workers * held; break;
      default: break;  // a coordinator, or Redis without a loss: leases are held
    }
  }
  for (const auto& job : jobs) {
    if (job.nature == PlannedJob::Nature::kKillsWorkers) count += 5 * job.units * held;
    if (job.nature == PlannedJob::Nature::kHangs) count += job.units * held;
  }
  return count;
}

bool Plan::has(Kind kind) const {
  return std::any_of(faults.begin(), faults.end(), [&](const auto& fault) { return fault.kind == kind; });
}

int Plan::cut_offs() const {
  return static_cast<int>(std::count_if(faults.begin(), faults.end(), [this](const PlannedFault& fault) {
    const bool worker = fault.target % (1 + coordinators + workers) > coordinators;  // Fleet::any_process
    return (worker && (fault.kind == Kind::kPartition || fault.kind == Kind::kSilence)) ||
           (worker && fault.kind == Kind::kHold && fault.lasts > 700 * kMs) ||
           (fault.kind == Kind::kStopWorker && fault.lasts > 700 * kMs);
  }));
}

int Plan::losses() const {
  int count = 0;
  for (const auto& fault : faults) {
    switch (fault.kind) {
      case Kind::kDrainWorker:
      case Kind::kKillCoordinator:
      case Kind::kStopCoordinator:
      case Kind::kRestartCoordinator:
      case Kind::kUpgrade:
      case Kind::kFillMemory:
      case Kind::kSlowStore:
      case Kind::kBrokenStore: break;
      default: ++count;
    }
  }
  for (const auto& job : jobs)
    if (job.nature == PlannedJob::Nature::kKillsWorkers || job.nature == PlannedJob::Nature::kHangs) ++count;
  return count;
}

}  // namespace ditfleet::history
