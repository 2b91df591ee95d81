// How much of the fleet each tenant has had: virtual time in GPU-microseconds divided by the tenant's weight.
// Who has had least goes first.
//
// Pure and not thread safe.
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
  // Weights of tenants by name; others weigh 1. A weight is made at least 0.001.
  explicit Tenants(std::map<std::string, double> weights);

  TenantId intern(const std::string& name);
  std::optional<TenantId> find(const std::string& name) const;
  const std::string& name(TenantId t) const { return tenants_[t].name; }
  double weight(TenantId t) const { return tenants_[t].weight; }
  std::int64_t virtual_time(TenantId t) const { return tenants_[t].virtual_time; }

  // A unit of the tenant is open (queued or held by a worker) / no longer. A tenant whose first unit opens
  // starts at the least settled virtual time of those that have open units, or at the most anybody ever had
  // if none has: time spent idle buys no credit.
  void open(TenantId t);
  void close(TenantId t);
  // A unit of the tenant waits for a worker / no longer. A tenant whose first unit waits starts among those that wait
  // already, no lower than the one that has had least and no higher than the one that has had most, or, if none does,
  // level by settled time with whoever had most: who had little because it asked for little has no claim on others for
  // that, and who had much while nobody else asked owes them nothing.
  void wait(TenantId t);
  void leave(TenantId t);
  // Service is charged in advance by its prediction, and settled by what it was (0: there was none). Until
  // then it counts for the order, but nobody who comes fresh is made to start behind a mere guess: a prediction
  // that no observed run stands behind. settle() takes what charge() was given.
  void charge(TenantId t, std::int64_t predicted_us, bool guess = false);
  void settle(TenantId t, std::int64_t predicted_us, std::int64_t actual_us, bool guess = false);

  // For storing and restoring: the times of those that wait. No other's means anything, as wait() starts it anew. What
  // is charged in advance is part of the stored time: restore() overrides the time, and leaves open what had been
  // charged before the call. Who waits and is not among those that are restored began after they were stored, and
  // starts among them.
  std::map<std::string, std::int64_t> times() const;
  void restore(const std::map<std::string, std::int64_t>& times);
  // Forgets idle tenants that would start afresh anyhow, when there are more than `keep`.
  // Their ids are reused.
  void prune(std::size_t keep);

 private:
  struct Tenant {
    std::string name;
    double weight = 1.0;
    std::int64_t virtual_time = 0;
    std::int64_t in_advance = 0;  // the part of it that is not settled
    std::int64_t guessed = 0;     // the part of that which is a guess
    std::uint32_t open = 0, waiting = 0;
    bool used = false;
    std::int64_t settled() const { return virtual_time - in_advance; }
    std::int64_t known() const { return virtual_time - guessed; }
  };
  void move(TenantId t, std::int64_t time, std::int64_t in_advance, std::int64_t guessed);
  std::int64_t start_time() const;
  // No lower than `least` and no higher than `most`.
  void move_between(TenantId t, std::int64_t least, std::int64_t most);

  std::map<std::string, double> weights_;
  std::vector<Tenant> tenants_;
  std::vector<TenantId> free_;
  std::unordered_map<std::string, TenantId> by_name_;
  std::set<std::pair<std::int64_t, TenantId>> active_;   // that have open units, by settled time
  std::set<std::pair<std::int64_t, TenantId>> waiting_;  // that have waiting ones, by what of their time is no guess
  std::int64_t most_ = 0;                                // of all virtual times
};

}  // namespace ditfleet::scheduling
