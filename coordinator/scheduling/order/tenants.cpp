#include "coordinator/scheduling/order/tenants.h"

#include <algorithm>
#include <cmath>

#include "coordinator/scheduling/placement/dense.h"

namespace ditfleet::scheduling {

TenantId Tenants::intern(const std::string& name) {
  if (const auto it = by_name_.find(name); it != by_name_.end()) return it->second;
  const auto id = take_id(tenants_, free_);
  auto& tenant = tenants_[id];
  tenant = {.name = name, .used = true};
  if (const auto it = weights_.find(name); it != weights_.end()) tenant.weight = std::max(0.001, it->second);
  by_name_.emplace(name, id);
  return id;
}

std::optional<TenantId> Tenants::find(const std::string& name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? std::nullopt : std::optional(it->second);
}

std::int64_t Tenants::start_time() const { return active_.empty() ? most_ : active_.begin()->first; }

void Tenants::open(TenantId t) {
  auto& tenant = tenants_[t];
  if (tenant.open++ > 0) return;
  tenant.virtual_time = std::max(tenant.virtual_time, start_time() + tenant.in_advance);
  active_.emplace(tenant.settled(), t);
}

void Tenants::close(TenantId t) {
  auto& tenant = tenants_[t];
  if (tenant.open == 0 || --tenant.open > 0) return;
  active_.erase({tenant.settled(), t});
}

void Tenants::wait(TenantId t) {
  auto& tenant = tenants_[t];
  if (tenant.waiting++ > 0) return;
  if (waiting_.empty()) {
    move(t, std::max<std::int64_t>(0, most_ - tenant.settled()), 0, 0);
  } else {
    move_between(t, waiting_.begin()->first, waiting_.rbegin()->first);
  }
  waiting_.emplace(tenant.known(), t);
}

void Tenants::move_between(TenantId t, std::int64_t least, std::int64_t most) {
  const auto known = tenants_[t].known();
  move(t, std::clamp(known, least, most) - known, 0, 0);
}

void Tenants::leave(TenantId t) {
  auto& tenant = tenants_[t];
  if (tenant.waiting == 0) return;
  if (--tenant.waiting == 0) waiting_.erase({tenant.known(), t});
}

void Tenants::move(TenantId t, std::int64_t time, std::int64_t in_advance, std::int64_t guessed) {
  auto& tenant = tenants_[t];
  const bool listed = waiting_.erase({tenant.known(), t}) > 0;
  if (tenant.open > 0) active_.erase({tenant.settled(), t});
  tenant.virtual_time += time;
  tenant.in_advance += in_advance;
  tenant.guessed += guessed;
  most_ = std::max(most_, tenant.settled());
  if (tenant.open > 0) active_.emplace(tenant.settled(), t);
  if (listed) waiting_.emplace(tenant.known(), t);
  if (moved_ && time != 0) moved_(t, tenant.virtual_time - time);
}

void Tenants::charge(TenantId t, std::int64_t predicted_us, bool guess) {
  const auto virtual_us = std::llround(static_cast<double>(predicted_us) / tenants_[t].weight);
  move(t, virtual_us, virtual_us, guess ? virtual_us : 0);
}

void Tenants::settle(TenantId t, std::int64_t predicted_us, std::int64_t actual_us, bool guess) {
  const double weight = tenants_[t].weight;
  const auto predicted = std::llround(static_cast<double>(predicted_us) / weight);
  move(t, std::llround(static_cast<double>(actual_us) / weight) - predicted, -predicted, guess ? -predicted : 0);
}

std::map<std::string, std::int64_t> Tenants::times() const {
  std::map<std::string, std::int64_t> out;
  for (const auto& [known, t] : waiting_) out.emplace(tenants_[t].name, tenants_[t].virtual_time);
  return out;
}

std::map<std::string, Tenants::Waiting> Tenants::waiting() const {
  std::map<std::string, Waiting> out;
  for (const auto& [known, t] : waiting_) out[tenants_[t].name] = {tenants_[t].virtual_time, tenants_[t].waiting};
  return out;
}

void Tenants::restore(const std::map<std::string, std::int64_t>& times) {
  std::vector<TenantId> others;
  std::optional<std::int64_t> least, most;
  for (const auto& [name, time] : times) {
    const auto t = intern(name);
    move(t, time - tenants_[t].virtual_time, 0, 0);
  }
  for (const auto& [known, t] : waiting_) {  // in ascending order
    if (!times.contains(tenants_[t].name)) {
      others.push_back(t);
      continue;
    }
    least = least.value_or(known);
    most = known;
  }
  if (!least) return;
  for (const auto t : others) move_between(t, *least, *most);
}

void Tenants::prune(std::size_t keep) {
  if (by_name_.size() <= keep) return;
  const auto start = start_time();
  for (TenantId id = 0; id < tenants_.size(); ++id) {
    auto& tenant = tenants_[id];
    if (!tenant.used || tenant.open > 0 || tenant.virtual_time > start) continue;
    by_name_.erase(tenant.name);
    tenant = {};
    free_.push_back(id);
  }
}

}  // namespace ditfleet::scheduling
