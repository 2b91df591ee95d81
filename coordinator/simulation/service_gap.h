// How far one tenant's service runs ahead of another's while both have units waiting, at the widest; all weigh the
// same.
//
// Service counts when a unit leaves the queue for a worker. What a tenant has in flight when a stretch of common
// waiting begins counts as its lead: the other, who comes to workers that are taken, is meant to catch up with it, and
// that lead is nobody's fault. What counts is a lead beyond it, at the end of a moment. Pure.
//
// Whoever begins to wait, and whoever moved in a moment, is held against all that wait: thousands of tenants are fine.
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
  // A unit leaves the queue for a worker, where it will take so long; it comes back; it has ended.
  void assigned(const std::string& tenant, std::int64_t us) { move(id_of(tenant), us, -1); }
  void returned(const std::string& tenant, std::int64_t us) { move(id_of(tenant), -us, 1); }
  // One that is under way takes so much more, for what was to be its worker's first of a shape before it was taken
  // back.
  void corrected(const std::string& tenant, std::int64_t us) {
    if (us != 0) move(id_of(tenant), us, 0);
  }
  void ended(const std::string& tenant, std::int64_t us) { tenants_[id_of(tenant)].in_flight_us -= us; }

  // A moment is over, and all that was to happen in it has: what went before what at one moment is nobody's lead.
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
  void forget_widest() { widest_us_ = 0; }  // what comes counts, what was does not

 private:
  // Of common waiting with another, who waited already.
  struct Stretch {
    std::int64_t begin_us = 0;  // lead over the other when it began, service and all
    std::int64_t lead_us = 0;   // what of it counts: by what was in flight
  };
  struct Tenant {
    std::int64_t waiting = 0, service_us = 0, in_flight_us = 0;
    std::uint64_t began = 0;     // to wait, in the order of all beginnings
    bool moved = false;          // since look()
    std::vector<Stretch> since;  // by the other's id; of those that waited when it began
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
