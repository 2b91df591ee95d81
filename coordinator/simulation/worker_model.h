// A simulated worker. It runs its units in order. While a unit runs, it loads adapters from their source, one at a
// time, and copies them into slots. It evicts the adapters that the assignment lists, else the least recently used one.
//
// No I/O. Times are microseconds of the virtual clock.
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
  std::string nonce, class_key, adapter;  // adapter may be empty
  std::int64_t run_us = 0;                // warm, adapter in a slot
  std::int64_t cold_us = 0;               // added if the class is cold
  std::int64_t taken_us = 0;
  std::vector<std::string> drop_from_host, drop_from_slots;
};

class WorkerModel {
 public:
  WorkerModel(std::string name, const CostTable& costs) : name_(std::move(name)), costs_(&costs) {}

  // True: the worker neither ran nor holds a unit of this class.
  bool is_cold(const std::string& class_key) const;
  // Appends the unit and loads its adapter if needed. True: the adapter was neither in host memory nor being loaded.
  bool take(ModelUnit unit, std::int64_t now_us);
  // Removes and returns the unit unless it runs.
  std::optional<ModelUnit> revoke(const queue::Attempt& attempt);

  // Starts the next unit if none runs and its adapter is in host memory. Otherwise call again at next_us().
  struct Started {
    const ModelUnit* unit = nullptr;
    std::int64_t started_us = 0, ends_us = 0;  // it starts once the adapter is in a slot
    bool slot_miss = false, cold_class = false;
  };
  std::optional<Started> start(std::int64_t now_us);
  std::optional<std::int64_t> next_us() const;  // when the next unit's adapter is loaded; empty while a unit runs
  ModelUnit finish(std::int64_t now_us);        // ends the running unit

  queue::WorkerInfo heartbeat(std::int64_t now_us) const;
  std::int64_t busy_us() const { return busy_us_; }

 private:
  struct Copy {
    std::string adapter;
    bool in_slot = false;
    int units = 0;  // held by the worker that need it
    std::int64_t ready_us = 0, used_us = 0;
  };
  Copy* find(const std::string& adapter);
  // The copy to evict from host memory, or from a slot: one of `preferred`, else the least recently used.
  Copy* victim(bool from_slot, const std::vector<std::string>& preferred);
  bool put_in_slot(const ModelUnit& unit, std::int64_t now_us);

  std::string name_;
  const CostTable* costs_;
  std::deque<ModelUnit> units_;
  bool running_ = false;
  std::int64_t loader_free_us_ = 0, busy_us_ = 0;
  std::int64_t last_end_us_ = 0;
  std::string last_adapter_;  // of the previous unit
  std::vector<Copy> copies_;
  std::set<std::string> warm_;
};

}  // namespace ditfleet::simulation
