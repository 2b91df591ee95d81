// Virtual time per tenant: the service it has had, in GPU-microseconds, divided by its weight. The tenant with the
// least virtual time goes first.
//
// No I/O, no clock; not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace ditfleet::scheduling {

using TenantId = std::uint32_t;

class Tenants {
 public:
  // Weights by tenant name; the default is 1, the minimum 0.001.
  explicit Tenants(std::map<std::string, double> weights);

  TenantId intern(const std::string& name);
  std::optional<TenantId> find(const std::string& name) const;
  const std::string& name(TenantId t) const { return tenants_[t].name; }
  double weight(TenantId t) const { return tenants_[t].weight; }
  std::int64_t virtual_time(TenantId t) const { return tenants_[t].virtual_time; }

  // A unit of the tenant opens (it is queued or held by a worker) or closes. A tenant whose first unit opens starts at
  // least at the lowest settled virtual time of the tenants with open units, or, without such tenants, at the highest
  // virtual time so far: idle time gives no credit.
  void open(TenantId t);
  void close(TenantId t);
  // A unit of the tenant begins or ceases to wait for a worker. The virtual time of a tenant whose first unit waits is
  // clamped to the range of the waiting tenants. Without waiting tenants its settled time is raised to the highest of
  // all. So idle tenants accumulate no credit, and uncontended use creates no debt.
  void wait(TenantId t);
  void leave(TenantId t);
  // charge() adds predicted service in advance; settle() replaces it by the actual service, with the arguments that
  // charge() got. A charge counts for the order at once. If it is a guess (no observed run supports the prediction), it
  // does not count for the time at which other tenants start.
  void charge(TenantId t, std::int64_t predicted_us, bool guess = false);
  void settle(TenantId t, std::int64_t predicted_us, std::int64_t actual_us, bool guess = false);

  // The virtual times of waiting tenants, for storing; wait() sets those of other tenants anew. Stored times include
  // charges that are not settled. restore() replaces the times and keeps such charges. A waiting tenant without a
  // stored time began to wait after the times were stored; its time is clamped to the range of the stored ones.
  std::map<std::string, std::int64_t> times() const;
  void restore(const std::map<std::string, std::int64_t>& times);
  // With more than `keep` tenants, forgets idle ones that would start at the same time anyway. Their ids are reused.
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
  std::vector<Tenant> tenants_;
  std::vector<TenantId> free_;
  std::unordered_map<std::string, TenantId> by_name_;
  std::set<std::pair<std::int64_t, TenantId>> active_;   // tenants with open units, by settled()
  std::set<std::pair<std::int64_t, TenantId>> waiting_;  // tenants with waiting units, by known()
  std::int64_t most_ = 0;                                // of all virtual times
};

}  // namespace ditfleet::scheduling
