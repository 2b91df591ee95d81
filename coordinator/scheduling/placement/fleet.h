// The workers: their state, the units they hold, when they will be free, their warm classes and the memory of their
// models. Updated from the worker registry and from the scheduler's own assignments.
//
// No I/O, no clock; not thread-safe. Times are microseconds of Redis' clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "coordinator/scheduling/placement/cost_model.h"
#include "coordinator/scheduling/placement/dense.h"
#include "coordinator/scheduling/placement/residency.h"
#include "shared/queue/types.h"

namespace ditfleet::scheduling {

// kSilent: no heartbeat for too long. kStuck: reported by a worker whose device or thread makes no progress. kOverdue:
// ready, but a unit runs for far longer than predicted. kProbing: ready, but units that it failed succeeded elsewhere.
// kGone: no longer registered, or another incarnation uses the name.
enum class WorkerState { kStarting, kReady, kDraining, kSilent, kStuck, kOverdue, kProbing, kGone };
std::string_view worker_state_name(WorkerState state);

struct HeldUnit {
  queue::UnitRef ref;
  ClassId cls = 0;
  std::int64_t run_us = 0;  // predicted, including the cost of a cold class and the load of the model
  std::int64_t assigned_us = 0, started_us = 0;
  bool started = false, cold = false;
  bool exclusive = false;  // the worker may hold no other unit beside it
  std::vector<AdapterId> adapters = {};
  std::int64_t ready_us = 0;  // when its adapters are in slots
  ModelId model = 0;
  std::int64_t load_us = 0;  // part of run_us: the predicted load of the model
};

struct Worker {
  std::string name, boot, owner;
  WorkerState state = WorkerState::kGone;
  std::uint64_t hash = 0;  // of the name, for rendezvous hashing
  int capacity = 0;        // units it may hold
  int gpus = 1;
  std::int64_t heartbeat_us = 0;
  std::vector<ModelId> models;
  std::vector<queue::ModelMemory> memory;  // of `models`; empty: the worker reported none
  std::vector<std::string> reported_warm;  // class keys
  std::unordered_set<std::string> warm;    // the shape keys of reported_warm
  std::vector<HeldUnit> held;              // in the order of assignment
  std::int64_t last_end_us = 0;
  std::int64_t handed_back_us = -1;  // when it last returned a unit; -1: never
  bool reserved = false;             // gets no unit, so that it becomes empty
  int failures = 0;                  // retryable failures since its last success
  int strikes = 0;                   // units that it failed and that succeeded elsewhere, since its last success
  std::int64_t backoff_us = 0;       // between probes; 0: it gets ordinary work
  std::int64_t rests_until_us = 0;   // no probe before

  bool rests(std::int64_t now_us) const { return state == WorkerState::kProbing && now_us < rests_until_us; }
  // Units that it has not started go to other workers.
  bool returns_units(std::int64_t now_us) const {
    return rests(now_us) ||
           (state != WorkerState::kStarting && state != WorkerState::kReady && state != WorkerState::kProbing);
  }
};

// The part of Worker that a routing decision reads of every worker, packed for speed.
struct WorkerLoad {
  std::int64_t free_at_us = 0;  // predicted end of all held units
  std::int64_t waiting_us = 0;  // predicted run of the held units that have not started
  std::uint64_t hash = 0;
  int held = 0, capacity = 0;
  int adapter_slots = 0;
  // The worker is kReady, or kProbing and due for a probe, and has handed back no unit since its last heartbeat.
  bool ready = false;

  bool has_capacity() const { return held < capacity; }
  // A unit that runs longer than predicted delays the units behind it.
  std::int64_t start_us(std::int64_t now_us) const { return std::max(free_at_us, now_us + waiting_us); }
};

// The memory of one model on one worker, packed for speed.
struct ModelRoom {
  std::int64_t max_pixels = kUnlimited;  // the largest request that some plan holds
  std::int64_t load_us = 0;              // to bring the weights to the device for the next unit that is assigned

  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
};

class Fleet {
 public:
  Fleet(int lookahead, std::int64_t silent_after_us);

  // Replaces the registry. Returns the workers that are gone and hold no unit: their owners are empty now, and their
  // ids will be reused. `model_of` interns model names.
  std::vector<WorkerId> update(const std::vector<queue::WorkerInfo>& infos, std::int64_t now_us,
                               const std::function<ModelId(const std::string&)>& model_of);

  // The worker with this owner ("name:run id"). Adds an unknown worker, because stored units may refer to workers that
  // are no longer registered.
  WorkerId intern_owner(const std::string& owner);

  void hold(WorkerId w, HeldUnit unit);
  // Does nothing if the worker does not hold the unit.
  void release(WorkerId w, const queue::UnitRef& ref, std::int64_t now_us);
  // The worker handed back a unit. It gets no other unit before a later heartbeat reports that it is ready.
  void handed_back(WorkerId w, std::int64_t at_us);
  // Under any run id.
  bool is_registered(std::string_view name) const;

  // Keeps the worker from getting units until release_reserved(), which releases all.
  void reserve(WorkerId w);
  void release_reserved();
  // The worker failed a unit that may succeed elsewhere; the worker's unit succeeded; a unit that failed on the worker
  // of this name succeeded elsewhere. After three of the last without a success of its own, the worker gets one unit at
  // a time, as a probe, until one succeeds. The pause between probes grows from 5 s to 5 min.
  void failed(WorkerId w, std::int64_t now_us);
  void succeeded(WorkerId w);
  void failed_alone(std::string_view name, std::int64_t now_us);
  HeldUnit* find_held(WorkerId w, const queue::UnitRef& ref);
  void started(WorkerId w, const queue::UnitRef& ref, std::int64_t at_us);

  // Sets the key of class `c`.
  void define_class(ClassId c, const std::string& class_key);
  bool is_warm(ClassId c, WorkerId w) const { return peek(peek(warm_, c), w) != 0; }

  const Worker& at(WorkerId w) const { return workers_[w]; }
  const WorkerLoad& load(WorkerId w) const { return loads_[w]; }
  Residency& adapters() { return adapters_; }
  const Residency& adapters() const { return adapters_; }
  std::size_t id_bound() const { return workers_.size(); }  // worker ids are below it
  // Workers that have the model, in any state.
  const std::vector<WorkerId>& with_model(ModelId m) const { return peek(by_model_, m); }
  // Ready workers with the model and spare capacity, ordered by the predicted end of all held units.
  using OpenWorkers = std::set<std::pair<std::int64_t, WorkerId>>;
  const OpenWorkers& open_workers(ModelId m) const { return peek(open_, m); }
  // The largest number of adapter slots of any open worker; -1 if no worker is open.
  int most_open_slots(ModelId m) const;
  // The largest number of adapter slots of any registered worker, open or not; -1 if no worker is registered.
  int most_adapter_slots(ModelId m) const;

  const ModelRoom& room(ModelId m, WorkerId w) const { return peek(peek(rooms_, m), w); }
  // The largest request that an open worker, or any registered worker, can hold. kUnlimited if there is no worker.
  std::int64_t most_open_pixels(ModelId m) const;
  std::int64_t most_pixels(ModelId m) const {
    return m < most_pixels_.size() ? most_pixels_[m] : ModelRoom::kUnlimited;
  }
  // A registered worker with most_pixels(); nothing if that is unlimited.
  std::optional<WorkerId> roomiest(ModelId m) const;
  // Precondition: the worker has the model. nullptr: it did not report the model's memory.
  const queue::ModelMemory* memory(ModelId m, WorkerId w) const;

 private:
  void apply(const queue::WorkerInfo& info, std::vector<ModelId> models);
  WorkerId allocate(const std::string& name, const std::string& boot);
  void refresh_warm(WorkerId w);
  void refresh_load(WorkerId w);
  void refresh_model_loads(WorkerId w);

  int lookahead_;
  std::int64_t silent_after_us_;
  std::int64_t now_us_ = 0;  // of the latest update
  Residency adapters_;
  std::vector<Worker> workers_;
  std::vector<WorkerLoad> loads_;
  std::vector<OpenWorkers> open_;                       // by model
  std::vector<std::map<int, std::size_t>> open_slots_;  // by model: number of open workers by adapter slots; none is 0
  std::vector<std::vector<ModelRoom>> rooms_;           // [model][worker]; the others are unlimited and need no load
  bool reports_memory_ = false;                         // some worker
  std::vector<std::int64_t> most_pixels_;               // by model
  std::vector<std::map<std::int64_t, std::size_t>> open_pixels_;  // by model: number of open workers by max_pixels
  std::vector<WorkerId> free_;
  std::unordered_map<std::string, WorkerId> by_owner_;
  std::vector<std::vector<WorkerId>> by_model_;
  std::vector<std::string> class_keys_;                              // shape keys, by class
  std::unordered_map<std::string, std::vector<ClassId>> class_ids_;  // by shape key
  std::vector<std::vector<std::uint8_t>> warm_;                      // [class][worker]
};

// A class key without its last field, the precision and the cache. A worker runs one precision, and a cache runs the
// same programs, so warmth does not depend on them. The configuration may say "auto" while the worker reports "bf16".
std::string_view shape_key(std::string_view class_key);

}  // namespace ditfleet::scheduling
