#include "coordinator/scheduling/order/fair_queue.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

namespace ditfleet::scheduling {
namespace {

constexpr int kMaxLooks = 16;  // at lanes of one tenant, except the first tenant

}  // namespace

FairQueue::Order FairQueue::order_of(const QueuedUnit& unit, Handle handle) {
  return {.negative_priority = -unit.priority,
          .deadline_us = unit.deadline_us > 0 ? unit.deadline_us : std::numeric_limits<std::int64_t>::max(),
          .due_us = unit.due_us,
          .arrival = unit.arrival,
          .handle = handle};
}

void FairQueue::reorder(TenantId t, std::int64_t before) {
  const auto after = tenants_.virtual_time(t);
  if (before == after) return;
  for (auto& model : models_) {
    if (model.order.erase({before, t}) > 0) model.order.emplace(after, t);
  }
}

FairQueue::Handle FairQueue::push(const QueuedUnit& unit) {
  const auto handle = take_id(units_, free_);
  units_[handle] = unit;
  auto& model = grown(models_, unit.model);
  if (unit.adapter_slots <= model.most_slots) tenants_.wait(unit.tenant);
  auto& backlog = model.backlogs[unit.tenant];
  if (backlog.groups.empty()) model.order.emplace(tenants_.virtual_time(unit.tenant), unit.tenant);
  auto& group = backlog.groups[unit.adapter_slots];
  auto& lane = backlog.lanes[unit.lane];
  const auto order = order_of(unit, handle);
  if (lane.empty() || order < *lane.begin()) {
    if (!lane.empty()) group.heads.erase({*lane.begin(), unit.lane});
    group.heads.emplace(order, unit.lane);
  }
  lane.insert(order);
  group.by_age.insert({unit.ready_us, unit.arrival, handle});
  ++model.units[unit.adapter_slots];
  backlog.prior_us += unit.prior_us;
  grown(lane_work_us_, unit.lane) += unit.prior_us;
  ++size_;
  return handle;
}

void FairQueue::remove(Handle handle) {
  const auto& unit = units_[handle];
  auto& model = models_[unit.model];
  auto& backlog = model.backlogs[unit.tenant];
  auto& group = backlog.groups[unit.adapter_slots];
  auto& lane = backlog.lanes[unit.lane];
  const auto order = order_of(unit, handle);
  const bool was_head = *lane.begin() == order;
  lane.erase(order);
  if (was_head) {
    group.heads.erase({order, unit.lane});
    if (!lane.empty()) group.heads.emplace(*lane.begin(), unit.lane);
  }
  if (lane.empty()) backlog.lanes.erase(unit.lane);
  group.by_age.erase({unit.ready_us, unit.arrival, handle});
  if (group.by_age.empty()) backlog.groups.erase(unit.adapter_slots);
  if (const auto it = model.units.find(unit.adapter_slots); --it->second == 0) model.units.erase(it);
  backlog.prior_us -= unit.prior_us;
  lane_work_us_[unit.lane] -= unit.prior_us;
  --size_;
  if (backlog.groups.empty()) {
    model.order.erase({tenants_.virtual_time(unit.tenant), unit.tenant});
    model.backlogs.erase(unit.tenant);
  }
  if (unit.adapter_slots <= model.most_slots) tenants_.leave(unit.tenant);
  free_.push_back(handle);
}

void FairQueue::set_most_slots(ModelId model_id, int adapter_slots) {
  auto& model = grown(models_, model_id);
  const int before = std::exchange(model.most_slots, adapter_slots);
  if (before == adapter_slots) return;
  std::vector<std::pair<TenantId, std::size_t>> begin;  // applied later: wait() changes the order
  for (const auto& [time, tenant] : model.order) {
    const auto& groups = model.backlogs.at(tenant).groups;
    std::size_t units = 0;
    for (auto it = groups.upper_bound(std::min(before, adapter_slots)),
              end = groups.upper_bound(std::max(before, adapter_slots));
         it != end; ++it) {
      units += it->second.by_age.size();
    }
    if (adapter_slots > before) {
      begin.emplace_back(tenant, units);
    } else {
      for (; units > 0; --units) tenants_.leave(tenant);
    }
  }
  for (auto [tenant, units] : begin) {
    for (; units > 0; --units) tenants_.wait(tenant);
  }
}

std::size_t FairQueue::unplaceable() const {
  std::size_t out = 0;
  for (const auto& model : models_) {
    for (auto it = model.units.upper_bound(model.most_slots); it != model.units.end(); ++it) out += it->second;
  }
  return out;
}

bool FairQueue::has_work(ModelId model, int adapter_slots) const {
  const auto& units = peek(models_, model).units;
  return !units.empty() && units.begin()->first <= adapter_slots;
}

template <class Closed>
const FairQueue::Age* FairQueue::oldest(const Backlog& backlog, int adapter_slots, std::int64_t before_us,
                                        Closed is_closed) const {
  const Age* out = nullptr;
  for (const auto& [needs, group] : backlog.groups) {
    if (needs > adapter_slots) break;
    int looks = 0;
    for (const auto& age : group.by_age) {
      if (age.ready_us >= before_us || (out != nullptr && *out < age) || ++looks > kMaxLooks) break;
      if (is_closed(units_[age.handle].lane)) continue;
      out = &age;
      break;
    }
  }
  return out;
}

template <class Visit>
void FairQueue::visit_heads(const Backlog& backlog, int adapter_slots, Visit visit) const {
  cursors_.clear();
  for (const auto& [needs, group] : backlog.groups) {
    if (needs > adapter_slots) break;
    cursors_.emplace_back(group.heads.begin(), group.heads.end());
  }
  while (!cursors_.empty()) {
    const auto by_head = [](const auto& a, const auto& b) { return *a.first < *b.first; };
    std::iter_swap(cursors_.rbegin(), std::min_element(cursors_.rbegin(), cursors_.rend(), by_head));
    auto [at, end] = cursors_.back();
    cursors_.pop_back();
    const auto other = std::min_element(cursors_.begin(), cursors_.end(), by_head);
    do {
      if (visit(at->first, at->second)) return;
    } while (++at != end && (other == cursors_.end() || *at < *other->first));
    if (at != end) cursors_.emplace_back(at, end);
  }
}

std::optional<FairQueue::Candidate> FairQueue::next(ModelId model_id, int adapter_slots, std::int64_t now_us,
                                                    const Round& round) const {
  if (model_id >= models_.size()) return std::nullopt;
  const auto is_closed = [&](LaneId lane) { return round.closed && round.closed(lane); };
  std::optional<Candidate> behind;  // of the tenant that has had least, if its lanes are skipped
  std::int64_t least = 0;           // virtual time of that tenant
  bool held_back = false;           // some unit was passed over because its tenant would get too far ahead
  for (const auto& [time, tenant] : models_[model_id].order) {
    if (behind && time - least > round.max_lead_us) return behind;
    const auto too_far = [&, at = time, who = tenant](Handle handle) {
      const bool too = behind && static_cast<double>(at - least) +
                                         static_cast<double>(units_[handle].cost_us) / tenants_.weight(who) >
                                     static_cast<double>(round.max_lead_us);
      held_back |= too;
      return too;
    };
    const auto& backlog = models_[model_id].backlogs.at(tenant);
    const auto* aged = oldest(backlog, adapter_slots, now_us - age_bound_us_, is_closed);
    if (aged != nullptr && !too_far(aged->handle)) {
      return Candidate{.handle = aged->handle, .aged = true};
    }
    const bool first = !behind;
    std::int64_t missing = 0;
    int looks = 0;
    std::optional<Candidate> found;
    visit_heads(backlog, adapter_slots, [&, at = time](const Order& order, LaneId lane) {
      if (!round.skipped(lane) && (first || !too_far(order.handle))) {
        found = Candidate{.handle = order.handle};
        return true;
      }
      if (!first) return ++looks >= kMaxLooks;
      if (is_closed(lane) || (behind && units_[behind->handle].priority != -order.negative_priority)) return false;
      const auto own = round.missing ? round.missing(lane) : 0;
      if (behind && own >= missing) return false;
      behind = Candidate{.handle = order.handle, .behind = true};
      missing = own;
      least = at;
      return false;
    });
    if (found) return found;
  }
  return held_back ? behind : std::nullopt;  // rather than leave capacity unused
}

// The placeable units of a backlog in order: those older than the age bound, then the others.
class FairQueue::Line {
 public:
  Line(const FairQueue& queue, const ModelQueue& model, TenantId tenant, std::int64_t before_us)
      : queue_(queue), backlog_(model.backlogs.at(tenant)), before_us_(before_us) {
    for (const auto& [needs, group] : backlog_.groups) {
      if (needs > model.most_slots && model.most_slots >= 0) break;  // below 0: there is no worker yet
      aged_.emplace_back(group.by_age.begin(), group.by_age.end());
      heads_.insert(group.heads.begin(), group.heads.end());
    }
  }
  std::optional<Handle> next() {
    std::pair<std::set<Age>::iterator, std::set<Age>::iterator>* first = nullptr;
    for (auto& ages : aged_) {
      if (ages.first != ages.second && ages.first->ready_us < before_us_ && (!first || *ages.first < *first->first))
        first = &ages;
    }
    if (first) return (first->first++)->handle;
    while (!heads_.empty()) {
      const auto [order, lane] = heads_.extract(heads_.begin()).value();
      const auto& units = backlog_.lanes.at(lane);
      if (const auto after = units.upper_bound(order); after != units.end()) heads_.emplace(*after, lane);
      if (queue_.at(order.handle).ready_us >= before_us_) return order.handle;
    }
    return std::nullopt;
  }

 private:
  const FairQueue& queue_;
  const Backlog& backlog_;
  std::int64_t before_us_;
  std::vector<std::pair<std::set<Age>::iterator, std::set<Age>::iterator>> aged_;  // what is left, by adapter slots
  Heads heads_;                                                                    // of each lane, what is left
};

std::vector<FairQueue::Handle> FairQueue::order(std::size_t most, std::int64_t now_us) const {
  std::vector<Handle> out;
  std::set<std::tuple<std::int64_t, ModelId, TenantId>> next;  // by virtual time
  for (ModelId m = 0; m < models_.size(); ++m) {
    for (const auto& [time, tenant] : models_[m].order) next.emplace(time, m, tenant);
  }
  std::map<std::pair<ModelId, TenantId>, Line> lines;
  while (out.size() < most && !next.empty()) {
    const auto [time, m, tenant] = next.extract(next.begin()).value();
    auto& line = lines.try_emplace({m, tenant}, *this, models_[m], tenant, now_us - age_bound_us_).first->second;
    const auto handle = line.next();
    if (!handle) continue;
    out.push_back(*handle);
    const double charge = static_cast<double>(at(*handle).cost_us) / tenants_.weight(tenant);
    next.emplace(time + static_cast<std::int64_t>(charge), m, tenant);
  }
  return out;
}

std::int64_t FairQueue::tenant_work_us(ModelId model, TenantId tenant) const {
  const auto& backlogs = peek(models_, model).backlogs;
  const auto it = backlogs.find(tenant);
  return it == backlogs.end() ? 0 : it->second.prior_us;
}

}  // namespace ditfleet::scheduling
