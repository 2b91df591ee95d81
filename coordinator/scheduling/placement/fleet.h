// The workers as the router sees them: who may be given work, what each holds, when it will be free, which
// classes it is warm for. Fed by the registry and by the scheduler's own assignments.
//
// Pure and not thread safe. Times are microseconds of Redis' clock.
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

// Silent: no heartbeat for too long. Gone: no longer registered, or another incarnation took its name.
enum class Standing { kStarting, kReady, kDraining, kSilent, kGone };
std::string_view standing_name(Standing standing);

struct HeldUnit {
  queue::UnitRef ref;
  ClassId cls = 0;
  std::int64_t run_us = 0;  // predicted, the cold class's cost included
  std::int64_t assigned_us = 0, started_us = 0;
  bool started = false, cold = false;
  std::vector<AdapterId> adapters = {};
  std::int64_t ready_us = 0;  // its adapters are in slots
};

struct Worker {
  std::string name, boot, owner;
  Standing standing = Standing::kGone;
  std::uint64_t hash = 0;  // of the name, for rendezvous hashing
  int limit = 0;           // units it may hold
  std::int64_t heartbeat_us = 0;
  std::vector<ModelId> models;
  std::vector<std::string> told_warm;    // class keys, as it says them
  std::unordered_set<std::string> warm;  // those without their precision
  std::vector<HeldUnit> held;            // in order of assignment
  std::int64_t free_at_us = 0;           // predicted end of all it holds
  std::int64_t waiting_us = 0;           // predicted run of what it holds and has not started
  std::int64_t last_end_us = 0;
  std::int64_t handed_back_us = -1;  // when it last did so; -1: never

  bool has_slot() const { return static_cast<int>(held.size()) < limit; }
  // An overrunning unit keeps what waits behind it waiting.
  std::int64_t start_us(std::int64_t now_us) const {
    const auto soonest = now_us + waiting_us;
    return free_at_us > soonest ? free_at_us : soonest;
  }
};

// What a routing decision reads of every worker, close together.
struct WorkerLoad {
  std::int64_t free_at_us = 0, waiting_us = 0;
  std::uint64_t hash = 0;
  int held = 0, limit = 0;
  int slots = 0;       // for adapters
  bool ready = false;  // takes units: its standing, and it has handed none back since

  bool has_slot() const { return held < limit; }
  std::int64_t start_us(std::int64_t now_us) const { return std::max(free_at_us, now_us + waiting_us); }
};

class Fleet {
 public:
  Fleet(int lookahead, std::int64_t silent_after_us);

  // Replaces the registry. Returns the workers whose standing changed; one that is gone and holds nothing has
  // an empty owner then, and its id will stand for another. `model_of` interns model names.
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

  // The incarnation "name:boot", made known if need be (a rebuild may name workers not registered any more).
  WorkerId intern_owner(const std::string& owner);

  void hold(WorkerId w, HeldUnit unit);
  // Not an error if it is not held. True: it was.
  bool release(WorkerId w, const queue::UnitRef& ref, std::int64_t now_us);
  // It handed a unit back: it has no room or goes away, and gets none before a heartbeat after that says that it is
  // ready.
  void handed_back(WorkerId w, std::int64_t at_us);
  HeldUnit* find_held(WorkerId w, const queue::UnitRef& ref);
  void started(WorkerId w, const queue::UnitRef& ref, std::int64_t at_us);

  // Class `c` stands for this key from now on.
  void define_class(ClassId c, const std::string& class_key);
  bool is_warm(ClassId c, WorkerId w) const { return c < warm_.size() && w < warm_[c].size() && warm_[c][w] != 0; }

  const Worker& at(WorkerId w) const { return workers_[w]; }
  const WorkerLoad& load(WorkerId w) const { return loads_[w]; }
  Residency& adapters() { return adapters_; }
  const Residency& adapters() const { return adapters_; }
  std::size_t slots() const { return workers_.size(); }
  // Workers that have the model, of any standing.
  const std::vector<WorkerId>& with_model(ModelId m) const;
  // Ready workers with the model and a slot, by when they will have run what they hold, as predicted: what overruns, or
  // has not begun, only makes it later.
  using Places = std::set<std::pair<std::int64_t, WorkerId>>;
  const Places& places(ModelId m) const;
  // The most adapter slots of a worker with a place; -1: there is no place.
  int widest_place(ModelId m) const;
  // The same of any worker that is registered, whatever its standing.
  int most_slots(ModelId m) const;

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
  std::vector<Places> places_;                      // by model
  std::vector<std::map<int, std::size_t>> widths_;  // by model: how many of its places have so many slots; none is 0
  std::vector<WorkerId> free_;
  std::unordered_map<std::string, WorkerId> by_owner_;
  std::vector<std::vector<WorkerId>> by_model_;
  std::vector<std::string> class_keys_;                              // without precision
  std::unordered_map<std::string, std::vector<ClassId>> class_ids_;  // by that
  std::vector<std::vector<std::uint8_t>> warm_;                      // [class][worker]
  std::vector<Standing> before_;
  std::vector<std::uint8_t> seen_;
};

// A class key as workers and scheduler compare it: a worker has one precision only, and may name it otherwise
// ("bf16") than a configuration that leaves it open ("auto").
std::string_view without_precision(std::string_view class_key);

}  // namespace ditfleet::scheduling
