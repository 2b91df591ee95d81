// How far one tenant's service runs ahead of another's while both have units waiting, at the widest; all weigh the same.
//
// Service counts when a unit leaves the queue for a worker. What a tenant has in flight when a stretch of common waiting
// begins counts as its lead: the other, who comes to workers that are taken, is meant to catch up with it, and that
// lead is nobody's fault. What counts is a lead beyond it. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace ditfleet::simulation {

class ServiceGap {
 public:
  void queued(const std::string& tenant) { wait(tenant, 1); }
  // A unit leaves the queue for a worker, where it will take so long; it comes back; it has ended.
  void assigned(const std::string& tenant, std::int64_t us) { move(tenant, us, -1); }
  void returned(const std::string& tenant, std::int64_t us) { move(tenant, -us, 1); }
  // One that is under way takes so much more: its worker's first of a shape.
  void corrected(const std::string& tenant, std::int64_t us) { move(tenant, us, 0); }
  void ended(const std::string& tenant, std::int64_t us) { tenants_[tenant].in_flight_us -= us; }

  std::int64_t widest_us() const { return widest_us_; }
  void forget_widest() { widest_us_ = 0; }  // what comes counts, what was does not

 private:
  struct Tenant {
    std::int64_t waiting = 0, service_us = 0, in_flight_us = 0;
  };
  struct Stretch {
    std::int64_t begin_us = 0;  // lead of the first by name over the second when it began, service and all
    std::int64_t lead_us = 0;   // what of it counts: by what was in flight
  };
  void wait(const std::string& tenant, int units) {
    auto& own = tenants_[tenant];
    const bool was = own.waiting > 0;
    own.waiting += units;
    if (was == (own.waiting > 0)) return;
    for (const auto& [name, other] : tenants_) {  // a stretch of common waiting begins or ends
      if (name == tenant || other.waiting <= 0) continue;
      const std::pair<std::string, std::string> key = std::minmax(name, tenant);
      if (was) {
        stretches_.erase(key);
      } else {
        const auto &first = tenants_[key.first], &second = tenants_[key.second];
        stretches_[key] = {first.service_us - second.service_us, first.in_flight_us - second.in_flight_us};
      }
    }
  }
  void move(const std::string& tenant, std::int64_t us, int units) {
    auto& own = tenants_[tenant];
    own.service_us += us;
    own.in_flight_us += us;
    for (const auto& [key, stretch] : stretches_) {
      if (key.first != tenant && key.second != tenant) continue;
      const auto lead = stretch.lead_us + tenants_[key.first].service_us - tenants_[key.second].service_us - stretch.begin_us;
      widest_us_ = std::max({widest_us_, lead - std::max<std::int64_t>(0, stretch.lead_us), -lead - std::max<std::int64_t>(0, -stretch.lead_us)});
    }
    if (units != 0) wait(tenant, units);
  }

  std::map<std::string, Tenant> tenants_;
  std::map<std::pair<std::string, std::string>, Stretch> stretches_;
  std::int64_t widest_us_ = 0;
};

}  // namespace ditfleet::simulation
