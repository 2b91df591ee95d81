// The processes of a history: coordinators, workers with a fake model, a producer; and the store that they share.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "shared/job/catalogue.h"
#include "shared/queue/client.h"
#include "tests/history/network.h"
#include "tests/history/plan.h"
#include "tests/history/world.h"

namespace ditfleet::history {

// A job of the plan, and what the producer was told of it.
struct Ordered {
  PlannedJob plan;
  std::int64_t seed = 0;  // of its first image; that of a unit is seed + unit
  std::string id;
  bool acknowledged = false, refused = false, settled = false;  // settled: the producer is done with it
  bool cancel_sent = false, lost = false;                       // lost: with the data that a Redis lost
  std::int64_t acknowledged_at = 0;
  std::map<int, int> failures;       // by unit: how often it was made to fail or hang, or killed its worker
  std::vector<queue::Event> events;  // as the queue's client reads them
  bool read = false;
};

// What the workers' fake models did, by the seed of an image.
struct Fleet {
  explicit Fleet(World& world, const Plan& plan);
  ~Fleet();

  // Starts the processes and schedules the plan.
  void begin();
  // All jobs were submitted, and none is open any more.
  bool quiet();
  // Has the producer read the events of its jobs.
  void read();
  // Looks for what must hold at any time.
  void look();
  // The first thing that was seen to be wrong; empty: nothing.
  std::string broken;

  World& world;
  const Plan plan;
  RedisServer redis;
  std::vector<Ordered> orders;
  std::map<std::string, std::string> store;  // results and checkpoints by key
  std::int64_t store_delay = 2 * kMs, store_slow_until = 0, store_broken_until = 0;
  std::int64_t last_fault_ends = 0;

  // Between the processes and their supervisor:
  struct Worker;
  struct Coordinator;
  struct Producer;
  Ordered* order_of(std::int64_t seed, int* unit = nullptr);
  void worker_dies(Worker& worker);  // from inside

 private:
  void start_worker(int index);
  void start_coordinator(int index);
  void perform(const PlannedFault& fault);
  void submit(Ordered& order);
  Process* any_process(int target);

  std::vector<std::shared_ptr<Worker>> workers_;
  std::vector<std::shared_ptr<Coordinator>> coordinators_;
  std::shared_ptr<Producer> producer_;
  std::map<std::int64_t, std::string> leaders_;  // by epoch
  std::int64_t two_lead_since_ = kNever;
  std::vector<std::shared_ptr<void>> dead_;  // a dead process destroys nothing
};

queue::QueueOptions queue_options();

// The Functions of a later version, whose records have another format (tests/test_family/next_format.lua).
const std::string& next_library();

}  // namespace ditfleet::history
