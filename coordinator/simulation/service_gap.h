// Measures fairness: the widest gap in service between two tenants of equal weight while both have units waiting.
//
// A unit counts as service when it is assigned to a worker. When two tenants start to wait at the same time, the
// difference between their service in flight is the initial lead, which the scheduler is expected to level. Only a gap
// beyond the initial lead counts. The order of events with equal timestamps is ignored.
//
// look() compares only changed tenants with all waiting tenants, so it is fast enough for thousands of tenants.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace ditfleet::simulation {

class ServiceGap {
 public:
  void queued(const std::string& tenant) { wait(id_of(tenant), 1); }
  // A unit that will run for `us` is assigned; it returns to the queue; it ends.
  void assigned(const std::string& tenant, std::int64_t us) { move(id_of(tenant), us, -1); }
  void returned(const std::string& tenant, std::int64_t us) { move(id_of(tenant), -us, 1); }
  // A unit in flight runs for `us` longer than was passed to assigned().
  void corrected(const std::string& tenant, std::int64_t us) {
    if (us != 0) move(id_of(tenant), us, 0);
  }
  void ended(const std::string& tenant, std::int64_t us) { tenants_[id_of(tenant)].in_flight_us -= us; }

  // Call it after all events of one timestamp.
  void look() {
    for (const auto id : moved_) {
      auto& own = tenants_[id];
      own.moved = false;
      if (own.waiting == 0) continue;
      for (const auto other : waiting_) {
        if (other != id)
          measure(own.began > tenants_[other].began ? id : other, own.began > tenants_[other].began ? other : id);
      }
    }
    moved_.clear();
  }

  std::int64_t widest_us() const { return widest_us_; }
  void forget_widest() { widest_us_ = 0; }

 private:
  // A stretch of time in which two tenants wait; kept by the tenant that began later.
  struct Stretch {
    std::int64_t begin_us = 0;  // lead in service over the other when it began
    std::int64_t lead_us = 0;   // initial lead: by units in flight
  };
  struct Tenant {
    std::int64_t waiting = 0, service_us = 0, in_flight_us = 0;
    std::uint64_t began = 0;     // sequence number of when it began to wait
    bool moved = false;          // since look()
    std::vector<Stretch> since;  // by the other tenant's id
  };

  std::size_t id_of(const std::string& name) {
    const auto [it, fresh] = ids_.emplace(name, tenants_.size());
    if (fresh) tenants_.emplace_back();
    return it->second;
  }
  void measure(std::size_t later, std::size_t other) {
    const auto& stretch = tenants_[later].since[other];
    const auto lead = stretch.lead_us + tenants_[later].service_us - tenants_[other].service_us - stretch.begin_us;
    widest_us_ = std::max({widest_us_, lead - std::max<std::int64_t>(0, stretch.lead_us),
                           -lead - std::max<std::int64_t>(0, -stretch.lead_us)});
  }
  void wait(std::size_t id, int units) {
    auto& own = tenants_[id];
    const bool was = own.waiting > 0;
    own.waiting += units;
    if (was == (own.waiting > 0)) return;
    if (was) {
      waiting_.erase(std::find(waiting_.begin(), waiting_.end(), id));
      own.since = {};
      return;
    }
    own.began = ++beginnings_;
    own.since.resize(tenants_.size());
    for (const auto other : waiting_) {
      own.since[other] = {own.service_us - tenants_[other].service_us, own.in_flight_us - tenants_[other].in_flight_us};
    }
    waiting_.push_back(id);
  }
  void move(std::size_t id, std::int64_t us, int units) {
    auto& own = tenants_[id];
    own.service_us += us;
    own.in_flight_us += us;
    if (!own.moved) moved_.push_back(id);
    own.moved = true;
    if (units != 0) wait(id, units);
  }

  std::unordered_map<std::string, std::size_t> ids_;
  std::vector<Tenant> tenants_;
  std::vector<std::size_t> waiting_, moved_;
  std::uint64_t beginnings_ = 0;
  std::int64_t widest_us_ = 0;
};

}  // namespace ditfleet::simulation
