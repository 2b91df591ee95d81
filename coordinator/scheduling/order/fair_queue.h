// Which ready unit is next. Between tenants: least virtual time. Within a tenant: units that have waited
// longer than the age bound, oldest first; then priority, earliest deadline, arrival. So the gap in service
// between two backlogged tenants is at most one unit's cost each way, and nothing starves behind a stream of
// higher priority.
//
// Units wait in lanes (one a shape class and set of adapters): the router decides alike for all units of a lane, so one
// that is better off waiting for its warm worker is skipped as a whole. No call looks at all queued units, nor at any
// that needs more slots than there are now: those cost nothing, however many they are.
//
// Pure and not thread safe. Times are microseconds of Redis' clock.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "coordinator/scheduling/order/tenants.h"
#include "coordinator/scheduling/placement/cost_model.h"

namespace ditfleet::scheduling {

using LaneId = std::uint32_t;

struct QueuedUnit {
  TenantId tenant = 0;
  ModelId model = 0;
  LaneId lane = 0;
  int priority = 0;
  std::int64_t deadline_us = 0;  // 0: none
  std::int64_t ready_us = 0;     // waits since
  std::int64_t due_us = 0;       // orders a tenant's units of one priority and deadline
  bool yielded = false;          // postpone() was called for it
  std::uint64_t arrival = 0;     // breaks ties; grows
  int slots = 0;                 // that a worker needs to take it; the same for all of a lane
  std::int64_t prior_us = 0;     // its work before any correction (cost_model.h)
  std::int64_t cost_us = 0;      // and with it: what its tenant would be charged
};

class FairQueue {
 public:
  using Handle = std::uint32_t;

  FairQueue(std::map<std::string, double> weights, std::int64_t age_bound_us);

  Tenants& tenants() { return tenants_; }
  const Tenants& tenants() const { return tenants_; }
  // As in Tenants, but the order follows: never call those for a tenant that may be queued.
  void charge(TenantId t, std::int64_t predicted_us, bool guess = false);
  void settle(TenantId t, std::int64_t predicted_us, std::int64_t actual_us, bool guess = false);
  // Another prediction of what is charged in advance.
  void correct(TenantId t, std::int64_t before_us, std::int64_t after_us, bool guess_before = false,
               bool guess_after = false);
  void restore(const std::map<std::string, std::int64_t>& times);

  Handle push(const QueuedUnit& unit);
  void remove(Handle handle);
  // It comes later among its tenant's units of one priority and deadline.
  void postpone(Handle handle, std::int64_t due_us);
  const QueuedUnit& at(Handle handle) const { return units_[handle]; }
  std::size_t size() const { return size_; }

  struct Candidate {
    Handle handle = 0;
    bool aged = false;    // takes whoever can run it
    bool behind = false;  // its tenant's turn, whatever others would gain
  };
  // What a round of decisions knows of the lanes it has looked at.
  struct Round {
    std::function<bool(LaneId)> skipped;                 // it is better off waiting
    std::function<bool(LaneId)> closed = nullptr;        // nobody took it though it was its turn
    std::function<std::int64_t(LaneId)> lack = nullptr;  // of a skipped one: what the best there is now lacks for it
    // Virtual time by which a tenant may be ahead, with a unit that goes now, of the one that has had least and whose
    // lanes are skipped: so much wider than without skipping a gap may be.
    std::int64_t lead_us = std::numeric_limits<std::int64_t>::max();
  };
  // The next unit of a model among those that need at most so many slots and whose lane is not skipped. An aged unit
  // comes regardless of that, unless its lane is closed. So does, once only tenants that would get too far ahead are
  // left, the one of the tenant with least that lacks least, among those of its highest priority.
  std::optional<Candidate> next(ModelId model, int slots, std::int64_t now_us, const Round& round) const;
  // There is a unit of the model that needs at most so many slots.
  bool has_work(ModelId model, int slots) const;

  // The most slots that a worker of the model has, -1 if there is none; until told: any number. A tenant whose units
  // all need more waits for nobody, hoards nothing meanwhile, and when there is such a worker it starts among those
  // that wait.
  void set_reach(ModelId model, int slots);
  std::size_t out_of_reach() const;  // units that need more

  // The first of those behind this one that `fits` says yes to: of the same tenant, priority and deadline, first of
  // their lanes, needing at most so many slots, due at most so much later. Looks at so many at most.
  std::optional<Handle> find_behind(Handle handle, int slots, std::int64_t within_us, int most,
                                    const std::function<bool(const QueuedUnit&)>& fits) const;

  // Work that waits (sum of priors), by lane, and by tenant and model.
  std::int64_t lane_work_us(LaneId lane) const;
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
  struct Width {  // one tenant's units of one model that need so many slots
    Heads heads;  // the first of every lane
    std::set<Age> by_age;
  };
  struct Backlog {  // one tenant's units of one model
    std::unordered_map<LaneId, Lane> lanes;
    std::map<int, Width> widths;  // none is empty
    std::int64_t prior_us = 0;
  };
  struct ModelQueue {
    std::unordered_map<TenantId, Backlog> backlogs;
    std::set<std::pair<std::int64_t, TenantId>> order;  // by virtual time
    std::map<int, std::size_t> units;                   // by the slots they need; none is 0
    int reach = std::numeric_limits<int>::max();
  };
  static Order order_of(const QueuedUnit& unit, Handle handle);
  static const Age* oldest(const Backlog& backlog, int slots);
  // Shows `visit` the heads of lanes that need at most so many slots, in order, from the first behind `after` (null:
  // from the first), until it returns true.
  template <class Visit>
  void visit_heads(const Backlog& backlog, int slots, const Heads::value_type* after, Visit visit) const;
  void wait(TenantId t, std::size_t units);
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
