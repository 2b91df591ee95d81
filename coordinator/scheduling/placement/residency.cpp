#include "coordinator/scheduling/placement/residency.h"

#include <algorithm>
#include <cmath>

namespace ditfleet::scheduling {
namespace {

constexpr double kDemandWindowUs = 300e6;  // demand decays to 1/e in five minutes

}  // namespace

AdapterId Residency::intern(const std::string& name) {
  const auto [it, fresh] = ids_.emplace(name, 0);
  if (fresh) {
    it->second = take_id(adapters_, free_);
    adapters_[it->second].name = name;
  }
  return it->second;
}

void Residency::set_size(AdapterId a, std::int64_t bytes) {
  adapters_[a].bytes = bytes;
  adapters_[a].sized = true;
}

void Residency::forget_sizes() {
  for (auto& adapter : adapters_) adapter.sized = false;
}

void Residency::prune() {
  if (ids_.size() < prune_from_) return;
  for (auto it = ids_.begin(); it != ids_.end();) {
    const auto id = it->second;
    const auto& adapter = adapters_[id];
    if (adapter.sized || adapter.pinned || adapter.referred > 0 || !adapter.places.empty()) {
      ++it;
      continue;
    }
    it = ids_.erase(it);
    adapters_[id] = {};
    free_.push_back(id);
  }
  prune_from_ = std::max<std::size_t>(1024, 2 * ids_.size());
}

void Residency::asked_for(AdapterId a, std::int64_t now_us) {
  auto& adapter = adapters_[a];
  const auto passed = static_cast<double>(std::max<std::int64_t>(0, now_us - adapter.asked_us));
  adapter.asked = adapter.asked * std::exp(-passed / kDemandWindowUs) + 1.0;
  adapter.asked_us = now_us;
}

double Residency::demand(AdapterId a, std::int64_t now_us) const {
  const auto& adapter = adapters_[a];
  const auto passed = static_cast<double>(std::max<std::int64_t>(0, now_us - adapter.asked_us));
  return adapter.asked * std::exp(-passed / kDemandWindowUs) / (kDemandWindowUs / 1e6);
}

Residency::Copy* Residency::find(Holder& holder, AdapterId a) {
  for (auto& copy : holder.copies) {
    if (copy.adapter == a) return &copy;
  }
  return nullptr;
}

void Residency::update_place(WorkerId w, const Copy& copy) {
  for (auto& place : adapters_[copy.adapter].places) {
    if (place.worker == w) place = {w, copy.in_slot, copy.ready_us};
  }
}

void Residency::remove_place(WorkerId w, AdapterId a) {
  auto& places = adapters_[a].places;
  const auto it = std::find_if(places.begin(), places.end(), [w](const Place& p) { return p.worker == w; });
  if (it == places.end()) return;
  *it = places.back();
  places.pop_back();
}

std::int64_t Residency::load_us(const Holder& holder, std::int64_t bytes) const {
  return static_cast<std::int64_t>(static_cast<double>(bytes) * holder.load_us_per_byte);
}

bool Residency::has_spare_slot(WorkerId w) const {
  const auto& copies = peek(workers_, w).copies;
  return std::count_if(copies.begin(), copies.end(), [](const Copy& c) { return c.in_slot; }) < slots(w);
}

std::size_t Residency::unreported(WorkerId w, std::span<const AdapterId> wanted) const {
  const auto& copies = peek(workers_, w).copies;
  return static_cast<std::size_t>(std::count_if(wanted.begin(), wanted.end(), [&](AdapterId a) {
    return std::none_of(copies.begin(), copies.end(), [a](const Copy& c) { return c.adapter == a && c.reported; });
  }));
}

void Residency::report(WorkerId w, const queue::WorkerInfo& info, std::int64_t now_us) {
  auto& holder = grown(workers_, w);
  holder.slots = info.adapter_slots;
  holder.host_bytes = info.host_adapter_bytes;
  if (info.adapter_load_bytes_per_s > 0)
    holder.load_us_per_byte = 1e6 / static_cast<double>(info.adapter_load_bytes_per_s);
  if (info.adapter_swap_us > 0) holder.swap_us = info.adapter_swap_us;
  std::vector<Copy> copies;
  const auto mention = [&](AdapterId a, bool in_slot) {
    for (auto& copy : copies) {
      if (copy.adapter != a) continue;
      copy.in_slot |= in_slot;
      return;
    }
    copies.push_back({.adapter = a, .in_slot = in_slot, .reported = true, .ready_us = now_us, .used_us = now_us});
  };
  for (const auto& name : info.adapters) mention(intern(name), true);
  for (const auto& name : info.host_adapters) mention(intern(name), false);
  for (auto& copy : copies) {
    const auto* old = find(holder, copy.adapter);
    if (old == nullptr) {
      add_place(w, copy);
      continue;
    }
    copy.units = old->units;
    copy.used_us = old->used_us;
    copy.in_slot |= old->units > 0 && old->in_slot;  // it will be when its unit starts
    copy.ready_us = std::min(old->ready_us, now_us);
    if (copy.in_slot != old->in_slot || copy.ready_us != old->ready_us) update_place(w, copy);
  }
  for (const auto& old : holder.copies) {
    if (std::any_of(copies.begin(), copies.end(), [&](const Copy& c) { return c.adapter == old.adapter; })) continue;
    if (old.units > 0) {
      copies.push_back(old);  // being loaded
      copies.back().reported = false;
    } else {
      remove_place(w, old.adapter);
    }
  }
  holder.copies = std::move(copies);
  holder.used_bytes = 0;
  for (const auto& copy : holder.copies) holder.used_bytes += adapters_[copy.adapter].bytes;
}

void Residency::forget(WorkerId w) {
  if (w >= workers_.size()) return;
  for (const auto& copy : workers_[w].copies) remove_place(w, copy.adapter);
  workers_[w] = {};
}

double Residency::worth(const Copy& copy, std::int64_t now_us) const {
  const auto& adapter = adapters_[copy.adapter];
  const auto holders = static_cast<double>(std::max<std::size_t>(1, adapter.places.size()));
  return demand(copy.adapter, now_us) * static_cast<double>(adapter.bytes) / holders;
}

Residency::Dropped Residency::hold(WorkerId w, std::span<const AdapterId> wanted, Eviction eviction,
                                   std::int64_t now_us) {
  Dropped dropped;
  if (wanted.empty()) return dropped;
  auto& holder = grown(workers_, w);
  for (const auto a : wanted) {  // first, so that none of them is evicted for another
    if (auto* copy = find(holder, a)) {
      ++copy->units;
      copy->used_us = now_us;
    }
  }
  // The copy to evict; null: all are needed or pinned.
  const auto victim = [&](bool slot) -> Copy* {
    Copy* worst = nullptr;
    double least = 0;
    for (auto& copy : holder.copies) {
      if (copy.units > 0 || (slot && !copy.in_slot) || adapters_[copy.adapter].pinned) continue;
      const double value =
          eviction == Eviction::kLeastRecentlyUsed ? static_cast<double>(copy.used_us) : worth(copy, now_us);
      if (worst != nullptr && value >= least) continue;
      worst = &copy;
      least = value;
    }
    return worst;
  };
  for (const auto a : wanted) {
    auto* copy = find(holder, a);
    if (copy == nullptr) {
      const auto bytes = adapters_[a].bytes;
      while (holder.used_bytes + bytes > holder.host_bytes) {
        auto* out = victim(false);
        if (out == nullptr) break;
        dropped.from_host.push_back(out->adapter);
        holder.used_bytes -= adapters_[out->adapter].bytes;
        remove_place(w, out->adapter);
        *out = holder.copies.back();
        holder.copies.pop_back();
      }
      holder.loader_free_us = std::max(now_us, holder.loader_free_us) + load_us(holder, bytes);
      holder.used_bytes += bytes;
      holder.copies.push_back({.adapter = a, .units = 1, .ready_us = holder.loader_free_us, .used_us = now_us});
      copy = &holder.copies.back();
      add_place(w, *copy);
    }
    if (copy->in_slot) continue;
    // Units run in order, so it is in a slot for the units behind this one.
    const auto used =
        std::count_if(holder.copies.begin(), holder.copies.end(), [](const Copy& c) { return c.in_slot; });
    if (used >= holder.slots) {
      auto* out = victim(true);
      if (out == nullptr) continue;
      out->in_slot = false;
      update_place(w, *out);
      dropped.from_slots.push_back(out->adapter);
    }
    copy->in_slot = true;
    update_place(w, *copy);
  }
  return dropped;
}

void Residency::release(WorkerId w, std::span<const AdapterId> adapters) {
  if (w >= workers_.size()) return;
  for (const auto a : adapters) {
    if (auto* copy = find(workers_[w], a); copy != nullptr && copy->units > 0) --copy->units;
  }
}

Residency::Scan Residency::scan(std::span<const AdapterId> adapters, std::int64_t now_us) const {
  Scan out;
  out.owner_ = this;
  out.count_ = static_cast<int>(adapters.size());
  out.now_us_ = now_us;
  if (adapters.empty()) return out;
  out.first_ = adapters_[adapters.front()].places;
  ++scans_;
  if (found_.size() < workers_.size()) found_.resize(workers_.size());
  for (const auto a : adapters) {
    out.bytes_ += adapters_[a].bytes;
    for (const auto& place : adapters_[a].places) {
      auto& found = found_[place.worker];
      if (found.scan != scans_) found = {.scan = scans_};
      ++found.here;
      found.in_slots += place.in_slot;
      found.bytes += adapters_[a].bytes;
      found.ready_us = std::max(found.ready_us, place.ready_us);
    }
  }
  return out;
}

AdapterNeed Residency::Scan::at(WorkerId w) const {
  AdapterNeed need;
  if (count_ == 0 || w >= owner_->workers_.size()) return need;
  const auto& holder = owner_->workers_[w];
  const auto& found = owner_->found_[w];
  const bool known = found.scan == owner_->scans_;
  const int here = known ? found.here : 0, in_slots = known ? found.in_slots : 0;
  if (known) need.ready_us = found.ready_us;
  if (here < count_) {
    need.load_us = owner_->load_us(holder, bytes_ - (known ? found.bytes : 0));
    need.ready_us = std::max(now_us_, holder.loader_free_us) + need.load_us;
  }
  need.swap_us = (count_ - in_slots) * holder.swap_us;
  if (need.swap_us > 0) need.ready_us = std::max(now_us_, need.ready_us) + need.swap_us;
  return need;
}

}  // namespace ditfleet::scheduling
