// The order of ready units. The tenant with the least virtual time goes first. Within a tenant, units that have waited
// longer than the age bound go first, oldest first; then priority, earliest deadline and due time decide. So the gap in
// service between two backlogged tenants is at most one unit's cost each way, and no unit starves behind a stream of
// higher priority.
//
// Units wait in lanes, one per shape class and set of adapters. Routing makes the same decision for all units of a
// lane, so a lane that waits for a full worker is skipped as a whole. No call iterates over all queued units, or over
// units that need more adapter slots than are open now.
//
// No I/O, no clock; not thread-safe. Times are microseconds of Redis' clock.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "coordinator/scheduling/order/tenants.h"
#include "coordinator/scheduling/placement/cost_model.h"
#include "coordinator/scheduling/placement/dense.h"

namespace ditfleet::scheduling {

using LaneId = std::uint32_t;

struct QueuedUnit {
  TenantId tenant = 0;
  ModelId model = 0;
  LaneId lane = 0;
  int priority = 0;
  std::int64_t deadline_us = 0;  // 0: none
  std::int64_t ready_us = 0;     // when it became ready
  std::int64_t due_us = 0;       // orders a tenant's units of equal priority and deadline
  std::uint64_t arrival = 0;     // breaks ties
  int adapter_slots = 0;         // needed; the same for all units of a lane
  std::int64_t prior_us = 0;     // the uncorrected prediction (cost_model.h)
  std::int64_t cost_us = 0;      // the corrected one: what the tenant would be charged
};

class FairQueue {
 public:
  using Handle = std::uint32_t;

  FairQueue(std::map<std::string, double> weights, std::int64_t age_bound_us)
      : tenants_(std::move(weights), [this](TenantId t, std::int64_t before) { reorder(t, before); }),
        age_bound_us_(age_bound_us) {}
  FairQueue(const FairQueue&) = delete;

  Tenants& tenants() { return tenants_; }  // changes of virtual times reorder the queue
  const Tenants& tenants() const { return tenants_; }

  Handle push(const QueuedUnit& unit);
  void remove(Handle handle);
  const QueuedUnit& at(Handle handle) const { return units_[handle]; }
  std::size_t size() const { return size_; }

  struct Candidate {
    Handle handle = 0;
    bool aged = false;    // older than the age bound
    bool behind = false;  // its tenant has the least virtual time and must not fall further behind
  };
  // The state of lanes in this round of decisions.
  struct Round {
    std::function<bool(LaneId)> skipped;                    // waits for a full worker, or found no worker
    std::function<bool(LaneId)> closed = nullptr;           // found no worker
    std::function<std::int64_t(LaneId)> missing = nullptr;  // of a skipped lane: Route::missing_us
    // How far, in virtual time, another tenant may get ahead of the tenant with the least virtual time while that
    // tenant's lanes are skipped. Skipping widens the gap in service by at most this much.
    std::int64_t max_lead_us = std::numeric_limits<std::int64_t>::max();
  };
  // The next unit of a model among those that need at most `adapter_slots` and whose lane is not skipped. Two kinds of
  // units are returned although their lane is skipped, unless it is closed:
  // - units older than the age bound;
  // - a unit of the tenant with the least virtual time, if every other tenant would exceed max_lead_us. Among the units
  //   of the tenant's highest priority, this is the unit with the lowest `missing`.
  std::optional<Candidate> next(ModelId model, int adapter_slots, std::int64_t now_us, const Round& round) const;
  // At most `most` placeable units in the order in which they would be taken if no lane were skipped.
  std::vector<Handle> order(std::size_t most, std::int64_t now_us) const;
  // True: some unit of the model needs at most `adapter_slots`.
  bool has_work(ModelId model, int adapter_slots) const;

  // The most adapter slots of the model's workers, -1 without workers; initially unlimited. Units that need more are
  // unplaceable: they do not count as waiting, so their tenant accumulates no credit for them.
  void set_most_slots(ModelId model, int adapter_slots);
  std::size_t unplaceable() const;

  // Waiting work (sum of priors), by lane, and by tenant and model.
  std::int64_t lane_work_us(LaneId lane) const { return peek(lane_work_us_, lane); }
  std::int64_t tenant_work_us(ModelId model, TenantId tenant) const;

 private:
  struct Order {
    int negative_priority = 0;
    std::int64_t deadline_us = 0;
    std::int64_t due_us = 0;
    std::uint64_t arrival = 0;
    Handle handle = 0;
    auto operator<=>(const Order&) const = default;
  };
  struct Age {
    std::int64_t ready_us = 0;
    std::uint64_t arrival = 0;
    Handle handle = 0;
    auto operator<=>(const Age&) const = default;
  };
  using Lane = std::set<Order>;
  using Heads = std::set<std::pair<Order, LaneId>>;
  struct SlotGroup {  // one tenant's units of one model that need the same number of adapter slots
    Heads heads;      // the first of every lane
    std::set<Age> by_age;
  };
  struct Backlog {  // one tenant's units of one model
    std::unordered_map<LaneId, Lane> lanes;
    std::map<int, SlotGroup> groups;  // by adapter slots; none is empty
    std::int64_t prior_us = 0;
  };
  struct ModelQueue {
    std::unordered_map<TenantId, Backlog> backlogs;
    std::set<std::pair<std::int64_t, TenantId>> order;  // by virtual time
    std::map<int, std::size_t> units;                   // by adapter slots; none is 0
    int most_slots = std::numeric_limits<int>::max();
  };
  class Line;
  static Order order_of(const QueuedUnit& unit, Handle handle);
  // The unit that became ready first, if that was before `before_us`. Passes over a few in closed lanes.
  template <class Closed>
  const Age* oldest(const Backlog& backlog, int adapter_slots, std::int64_t before_us, Closed is_closed) const;
  // Calls `visit` for the heads of lanes that need at most `adapter_slots`, in order, until it returns true.
  template <class Visit>
  void visit_heads(const Backlog& backlog, int adapter_slots, Visit visit) const;
  void reorder(TenantId t, std::int64_t before);

  Tenants tenants_;
  std::int64_t age_bound_us_;
  std::vector<QueuedUnit> units_;
  std::vector<Handle> free_;
  std::vector<ModelQueue> models_;
  std::vector<std::int64_t> lane_work_us_;  // by lane
  std::size_t size_ = 0;
  mutable std::vector<std::pair<Heads::const_iterator, Heads::const_iterator>> cursors_;  // scratch of visit_heads()
};

}  // namespace ditfleet::scheduling
