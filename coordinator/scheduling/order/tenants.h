// Virtual time per tenant: the GPU-microseconds of its units divided by its weight. The tenant with the least virtual
// time goes first.
//
// No I/O, no clock; not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ditfleet::scheduling {

using TenantId = std::uint32_t;

class Tenants {
 public:
  // Weights by tenant name; the default is 1, the minimum 0.001.
  // `moved` is called after a virtual time has changed, except by open(), with the time before.
  explicit Tenants(std::map<std::string, double> weights, std::function<void(TenantId, std::int64_t)> moved = {})
      : weights_(std::move(weights)), moved_(std::move(moved)) {}

  TenantId intern(const std::string& name);
  std::optional<TenantId> find(const std::string& name) const;
  const std::string& name(TenantId t) const { return tenants_[t].name; }
  double weight(TenantId t) const { return tenants_[t].weight; }
  std::int64_t virtual_time(TenantId t) const { return tenants_[t].virtual_time; }

  // Call open() when a unit of the tenant is queued or assigned, and close() when the unit ends. When the first unit of
  // a tenant opens, its virtual time is raised to the lowest settled virtual time of the tenants with open units. If
  // there are no such tenants, it is raised to the highest virtual time so far. Idle time therefore gives no credit.
  void open(TenantId t);
  void close(TenantId t);
  // Call wait() when a unit of the tenant starts to wait for a worker, and leave() when the unit stops waiting. When
  // the first unit of a tenant starts to wait, the tenant's virtual time is clamped to the range of the waiting
  // tenants. If there are none, its settled time is raised to the highest of all tenants. So idle tenants accumulate no
  // credit, and uncontended use creates no debt.
  void wait(TenantId t);
  void leave(TenantId t);
  // charge() adds predicted service in advance. settle() replaces the charge by the actual service; pass the arguments
  // of charge(). A charge affects the order immediately. If it is a guess (no observed run supports the prediction), it
  // does not affect the virtual time at which other tenants start.
  void charge(TenantId t, std::int64_t predicted_us, bool guess = false);
  void settle(TenantId t, std::int64_t predicted_us, std::int64_t actual_us, bool guess = false);

  // times() returns the virtual times of waiting tenants, for storing. Those of other tenants are not needed, because
  // wait() recomputes them. The times include charges that are not settled. restore() replaces the times and keeps such
  // charges. A waiting tenant without a stored time has started to wait after the times were stored; its time is
  // clamped to the range of the stored times.
  std::map<std::string, std::int64_t> times() const;
  struct Waiting {
    std::int64_t virtual_time = 0;
    std::uint32_t units = 0;
  };
  std::map<std::string, Waiting> waiting() const;
  void restore(const std::map<std::string, std::int64_t>& times);
  // If there are more than `keep` tenants, forgets idle tenants whose virtual time would be recomputed anyway. Their
  // ids are reused.
  void prune(std::size_t keep);

 private:
  struct Tenant {
    std::string name;
    double weight = 1.0;
    std::int64_t virtual_time = 0;
    std::int64_t in_advance = 0;  // the part of virtual_time that is not settled
    std::int64_t guessed = 0;     // the part of in_advance that is a guess
    std::uint32_t open = 0, waiting = 0;
    bool used = false;
    std::int64_t settled() const { return virtual_time - in_advance; }
    std::int64_t known() const { return virtual_time - guessed; }
  };
  void move(TenantId t, std::int64_t time, std::int64_t in_advance, std::int64_t guessed);
  std::int64_t start_time() const;
  // Clamps known() to [least, most].
  void move_between(TenantId t, std::int64_t least, std::int64_t most);

  std::map<std::string, double> weights_;
  std::function<void(TenantId, std::int64_t)> moved_;
  std::vector<Tenant> tenants_;
  std::vector<TenantId> free_;
  std::unordered_map<std::string, TenantId> by_name_;
  std::set<std::pair<std::int64_t, TenantId>> active_;   // tenants with open units, by settled()
  std::set<std::pair<std::int64_t, TenantId>> waiting_;  // tenants with waiting units, by known()
  std::int64_t most_ = 0;                                // of all virtual times
};

}  // namespace ditfleet::scheduling
