#include "coordinator/simulation/worker_model.h"

#include <algorithm>

namespace ditfleet::simulation {

WorkerModel::Copy* WorkerModel::find(const std::string& adapter) {
  const auto it = std::find_if(copies_.begin(), copies_.end(), [&](const Copy& c) { return c.adapter == adapter; });
  return it == copies_.end() ? nullptr : &*it;
}

WorkerModel::Copy* WorkerModel::victim(bool from_slot, const std::vector<std::string>& preferred) {
  const auto evictable = [&](const Copy& c) { return c.units == 0 && (!from_slot || c.in_slot); };
  for (const auto& name : preferred) {
    if (auto* copy = find(name); copy != nullptr && evictable(*copy)) return copy;
  }
  Copy* oldest = nullptr;
  for (auto& copy : copies_) {
    if (evictable(copy) && (oldest == nullptr || copy.used_us < oldest->used_us)) oldest = &copy;
  }
  return oldest;
}

bool WorkerModel::is_cold(const std::string& class_key) const {
  return !warm_.contains(class_key) &&
         std::none_of(units_.begin(), units_.end(), [&](const ModelUnit& u) { return u.class_key == class_key; });
}

bool WorkerModel::take(ModelUnit unit, std::int64_t now_us) {
  units_.push_back(std::move(unit));
  units_.back().taken_us = now_us;
  const auto& held = units_.back();
  if (held.adapter.empty()) return false;
  if (auto* copy = find(held.adapter)) {
    ++copy->units;
    return false;
  }
  const auto most = static_cast<std::size_t>(costs_->host_adapter_bytes / costs_->adapter_bytes);
  while (copies_.size() >= most) {
    auto* out = victim(false, held.drop_from_host);
    if (out == nullptr) break;  // all are needed: the worker exceeds its limit for a while
    *out = copies_.back();
    copies_.pop_back();
  }
  loader_free_us_ =
      std::max(now_us, loader_free_us_) +
      static_cast<std::int64_t>(static_cast<double>(costs_->adapter_bytes) / costs_->adapter_load_bytes_per_s * 1e6);
  copies_.push_back({.adapter = held.adapter, .units = 1, .ready_us = loader_free_us_, .used_us = now_us});
  return true;
}

std::optional<ModelUnit> WorkerModel::revoke(const queue::Attempt& attempt) {
  for (auto it = units_.begin() + (running_ ? 1 : 0); it < units_.end(); ++it) {
    if (it->ref != attempt.ref || it->nonce != attempt.nonce) continue;
    if (auto* copy = find(it->adapter)) --copy->units;
    auto unit = std::move(*it);
    units_.erase(it);
    return unit;
  }
  return std::nullopt;
}

bool WorkerModel::put_in_slot(const ModelUnit& unit, std::int64_t now_us) {
  auto* copy = find(unit.adapter);
  copy->used_us = now_us;
  if (copy->in_slot) return false;
  const auto used = std::count_if(copies_.begin(), copies_.end(), [](const Copy& c) { return c.in_slot; });
  if (used >= costs_->adapter_slots) {
    auto* out = victim(true, unit.drop_from_slots);
    if (out == nullptr) {  // all are needed by held units: evict one that is needed late
      out = &*std::find_if(copies_.rbegin(), copies_.rend(), [&](const Copy& c) { return c.in_slot; });
    }
    out->in_slot = false;
  }
  copy->in_slot = true;
  return true;
}

std::optional<std::int64_t> WorkerModel::next_us() const {
  if (running_ || units_.empty()) return std::nullopt;
  for (const auto& copy : copies_) {
    if (copy.adapter == units_.front().adapter) return copy.ready_us;
  }
  return 0;
}

std::optional<WorkerModel::Started> WorkerModel::start(std::int64_t now_us) {
  const auto ready = next_us();
  if (!ready || *ready > now_us) return std::nullopt;
  const auto& unit = units_.front();
  Started out{.unit = &unit, .started_us = now_us};
  if (!unit.adapter.empty() && put_in_slot(unit, now_us)) {
    out.slot_miss = true;
    // With another slot free, the copy overlaps the previous job.
    const auto began =
        costs_->adapter_slots > 1 ? std::max(unit.taken_us, *ready) : std::max({unit.taken_us, *ready, last_end_us_});
    out.started_us = std::max(now_us, began + costs_->adapter_swap_us);
  }
  if (!out.slot_miss && !unit.adapter.empty() && unit.adapter != last_adapter_)
    out.started_us += costs_->adapter_resident_us;
  out.cold_class = warm_.insert(unit.class_key).second;
  out.ends_us = out.started_us + unit.run_us + (out.cold_class ? unit.cold_us : 0);
  busy_us_ += out.ends_us - now_us;
  running_ = true;
  return out;
}

ModelUnit WorkerModel::finish(std::int64_t now_us) {
  auto unit = std::move(units_.front());
  units_.pop_front();
  running_ = false;
  last_end_us_ = now_us;
  last_adapter_ = unit.adapter;
  if (auto* copy = find(unit.adapter)) --copy->units;
  return unit;
}

queue::WorkerInfo WorkerModel::heartbeat(std::int64_t now_us) const {
  queue::WorkerInfo info;
  info.name = name_;
  info.boot = "sim";
  info.state = "ready";
  info.models = {"model"};
  info.capacity = costs_->lookahead;
  info.heartbeat_ms = now_us / 1000;
  info.warm_classes.assign(warm_.begin(), warm_.end());
  info.adapter_slots = costs_->adapter_slots;
  info.host_adapter_bytes = costs_->host_adapter_bytes;
  info.adapter_load_bytes_per_s = static_cast<std::int64_t>(costs_->adapter_load_bytes_per_s);
  info.adapter_swap_us = costs_->adapter_swap_us;
  for (const auto& copy : copies_) {
    if (copy.in_slot) info.adapters.push_back(copy.adapter);
    if (copy.ready_us <= now_us) info.host_adapters.push_back(copy.adapter);
  }
  return info;
}

}  // namespace ditfleet::simulation
