// The workers: their state, the units they hold, when they will be free, and their warm classes. Updated from the
// worker registry and from the scheduler's own assignments.
//
// No I/O, no clock; not thread-safe. Times are microseconds of Redis' clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "coordinator/scheduling/placement/cost_model.h"
#include "coordinator/scheduling/placement/residency.h"
#include "shared/queue/types.h"

namespace ditfleet::scheduling {

// kSilent: no heartbeat for too long. kGone: no longer registered, or another incarnation uses the name.
enum class WorkerState { kStarting, kReady, kDraining, kSilent, kGone };
std::string_view worker_state_name(WorkerState state);

struct HeldUnit {
  queue::UnitRef ref;
  ClassId cls = 0;
  std::int64_t run_us = 0;  // predicted, including the cost of a cold class
  std::int64_t assigned_us = 0, started_us = 0;
  bool started = false, cold = false;
  std::vector<AdapterId> adapters = {};
  std::int64_t ready_us = 0;  // when its adapters are in slots
};

struct Worker {
  std::string name, boot, owner;
  WorkerState state = WorkerState::kGone;
  std::uint64_t hash = 0;  // of the name, for rendezvous hashing
  int capacity = 0;        // units it may hold
  std::int64_t heartbeat_us = 0;
  std::vector<ModelId> models;
  std::vector<std::string> reported_warm;  // class keys
  std::unordered_set<std::string> warm;    // the shape keys of reported_warm
  std::vector<HeldUnit> held;              // in the order of assignment
  std::int64_t free_at_us = 0;             // predicted end of all held units
  std::int64_t waiting_us = 0;             // predicted run of the held units that have not started
  std::int64_t last_end_us = 0;
  std::int64_t handed_back_us = -1;  // when it last returned a unit; -1: never

  bool has_capacity() const { return static_cast<int>(held.size()) < capacity; }
  // A unit that runs longer than predicted delays the units behind it.
  std::int64_t start_us(std::int64_t now_us) const {
    const auto soonest = now_us + waiting_us;
    return free_at_us > soonest ? free_at_us : soonest;
  }
};

// The part of Worker that a routing decision reads of every worker, packed for speed.
struct WorkerLoad {
  std::int64_t free_at_us = 0, waiting_us = 0;
  std::uint64_t hash = 0;
  int held = 0, capacity = 0;
  int adapter_slots = 0;
  bool ready = false;  // the worker is kReady and has handed back no unit since its last heartbeat

  bool has_capacity() const { return held < capacity; }
  std::int64_t start_us(std::int64_t now_us) const { return std::max(free_at_us, now_us + waiting_us); }
};

class Fleet {
 public:
  Fleet(int lookahead, std::int64_t silent_after_us);

  // Replaces the registry. Returns the workers whose state changed. The owner of a worker that is gone and holds no
  // unit becomes empty, and its id will be reused. `model_of` interns model names.
  template <class ModelOf>
  std::vector<WorkerId> update(const std::vector<queue::WorkerInfo>& infos, std::int64_t now_us, ModelOf model_of) {
    begin_update();
    for (const auto& info : infos) {
      std::vector<ModelId> models;
      for (const auto& name : info.models) models.push_back(model_of(name));
      apply(info, std::move(models), now_us);
    }
    return end_update();
  }

  // The worker with this owner ("name:run id"). Adds an unknown worker, because stored units may refer to workers that
  // are no longer registered.
  WorkerId intern_owner(const std::string& owner);

  void hold(WorkerId w, HeldUnit unit);
  // False: the worker does not hold the unit.
  bool release(WorkerId w, const queue::UnitRef& ref, std::int64_t now_us);
  // The worker handed back a unit. It gets no other unit before a later heartbeat reports that it is ready.
  void handed_back(WorkerId w, std::int64_t at_us);
  HeldUnit* find_held(WorkerId w, const queue::UnitRef& ref);
  void started(WorkerId w, const queue::UnitRef& ref, std::int64_t at_us);

  // Sets the key of class `c`.
  void define_class(ClassId c, const std::string& class_key);
  bool is_warm(ClassId c, WorkerId w) const { return c < warm_.size() && w < warm_[c].size() && warm_[c][w] != 0; }

  const Worker& at(WorkerId w) const { return workers_[w]; }
  const WorkerLoad& load(WorkerId w) const { return loads_[w]; }
  Residency& adapters() { return adapters_; }
  const Residency& adapters() const { return adapters_; }
  std::size_t id_bound() const { return workers_.size(); }  // worker ids are below it
  // Workers that have the model, in any state.
  const std::vector<WorkerId>& with_model(ModelId m) const;
  // Ready workers with the model and spare capacity, ordered by the predicted end of all held units.
  using OpenWorkers = std::set<std::pair<std::int64_t, WorkerId>>;
  const OpenWorkers& open_workers(ModelId m) const;
  // The largest number of adapter slots of any open worker; -1 if no worker is open.
  int most_open_slots(ModelId m) const;
  // The largest number of adapter slots of any registered worker, open or not; -1 if no worker is registered.
  int most_adapter_slots(ModelId m) const;

 private:
  void begin_update();
  void apply(const queue::WorkerInfo& info, std::vector<ModelId> models, std::int64_t now_us);
  std::vector<WorkerId> end_update();
  WorkerId allocate(const std::string& name, const std::string& boot);
  void recompute(Worker& worker);
  void refresh_warm(WorkerId w);
  void refresh_load(WorkerId w);

  int lookahead_;
  std::int64_t silent_after_us_;
  Residency adapters_;
  std::vector<Worker> workers_;
  std::vector<WorkerLoad> loads_;
  std::vector<OpenWorkers> open_;                       // by model
  std::vector<std::map<int, std::size_t>> open_slots_;  // by model: number of open workers by adapter slots; none is 0
  std::vector<WorkerId> free_;
  std::unordered_map<std::string, WorkerId> by_owner_;
  std::vector<std::vector<WorkerId>> by_model_;
  std::vector<std::string> class_keys_;                              // shape keys, by class
  std::unordered_map<std::string, std::vector<ClassId>> class_ids_;  // by shape key
  std::vector<std::vector<std::uint8_t>> warm_;                      // [class][worker]
  std::vector<WorkerState> states_before_;                           // the update
  std::vector<std::uint8_t> seen_;                                   // in the update
};

// A class key without its last field, the precision. A worker runs one precision, so warmth does not depend on the
// precision. The configuration may say "auto" while the worker reports "bf16".
std::string_view shape_key(std::string_view class_key);

}  // namespace ditfleet::scheduling
