// A worker as the simulation pretends: it runs its units in order, loads adapters from their source one after the
// other and copies them into slots beside the running job, and drops the least recently used for want of room, unless
// an assignment says what else to drop. Pure; times are microseconds of the virtual clock.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "coordinator/simulation/cost_table.h"
#include "shared/queue/types.h"

namespace ditfleet::simulation {

struct ModelUnit {
  queue::UnitRef ref;
  std::string nonce, class_key, adapter;  // empty: none
  std::int64_t run_us = 0;                // warm, adapter in a slot
  std::int64_t taken_us = 0;
  std::vector<std::string> drop_from_host, drop_from_slots;
};

class WorkerModel {
 public:
  WorkerModel(std::string name, const CostTable& costs) : name_(std::move(name)), costs_(&costs) {}

  // A unit of this class that comes now would be its first.
  bool is_cold(const std::string& class_key) const;
  // Appends the unit and begins to load what it needs. True: its adapter was not in host memory, nor on its way.
  bool take(ModelUnit unit, std::int64_t now_us);
  // Gives the unit back if it has not begun.
  std::optional<ModelUnit> revoke(const queue::Attempt& attempt);

  // The next unit begins if nothing runs and its adapter is there; else nothing. When to ask again: next_us().
  struct Started {
    const ModelUnit* unit = nullptr;
    std::int64_t started_us = 0, ends_us = 0;  // it starts when the adapter is in its slot
    bool slot_miss = false, cold_class = false;
  };
  std::optional<Started> start(std::int64_t now_us);
  std::optional<std::int64_t> next_us() const;  // when the adapter of the next unit is there; nothing while one runs
  ModelUnit finish(std::int64_t now_us);        // the one that runs has ended

  queue::WorkerInfo heartbeat(std::int64_t now_us) const;
  std::int64_t busy_us() const { return busy_us_; }

 private:
  struct Copy {
    std::string adapter;
    bool in_slot = false;
    int units = 0;  // it holds that need it
    std::int64_t ready_us = 0, used_us = 0;
  };
  Copy* find(const std::string& adapter);
  // What goes from host memory, or from a slot: what `wanted` names first, else the least recently used.
  Copy* victim(bool from_slot, const std::vector<std::string>& wanted);
  bool put_in_slot(const ModelUnit& unit, std::int64_t now_us);

  std::string name_;
  const CostTable* costs_;
  std::deque<ModelUnit> units_;
  bool running_ = false;
  std::int64_t loader_free_us_ = 0, busy_us_ = 0;
  std::int64_t last_end_us_ = 0;
  std::string last_adapter_;  // of the unit before
  std::vector<Copy> copies_;
  std::set<std::string> warm_;
};

}  // namespace ditfleet::simulation
