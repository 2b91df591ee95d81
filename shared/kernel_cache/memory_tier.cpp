#include "shared/kernel_cache/memory_tier.h"

#include <utility>

namespace ditfleet::kernel_cache {
namespace {

// The approximate size of an entry in memory.
std::uint64_t cost_of(const Entry& entry) {
  std::uint64_t bytes = sizeof(Entry) + 256 + entry.code.size() + entry.region.size() + entry.arch.size();
  for (const KernelInfo& kernel : entry.kernels)
    bytes += sizeof kernel + kernel.name.size() + kernel.parameter_bytes.size() * 4;
  return bytes;
}

}  // namespace

std::shared_ptr<const Entry> MemoryTier::find(const Key& key) {
  const std::lock_guard lock(mutex_);
  const auto it = by_key_.find(key);
  if (it == by_key_.end()) return nullptr;
  slots_.splice(slots_.begin(), slots_, it->second);
  return it->second->entry;
}

void MemoryTier::put(const Key& key, std::shared_ptr<const Entry> entry) {
  const std::uint64_t bytes = cost_of(*entry);
  const std::lock_guard lock(mutex_);
  erase_locked(key);
  if (bytes > max_bytes_) return;
  slots_.push_front({key, std::move(entry), bytes});
  by_key_[key] = slots_.begin();
  bytes_ += bytes;
  while (bytes_ > max_bytes_) erase_locked(Key(slots_.back().key));
}

void MemoryTier::erase(const Key& key, const std::shared_ptr<const Entry>& entry) {
  const std::lock_guard lock(mutex_);
  if (const auto it = by_key_.find(key); it != by_key_.end() && it->second->entry == entry) erase_locked(key);
}

void MemoryTier::erase_locked(const Key& key) {
  const auto it = by_key_.find(key);
  if (it == by_key_.end()) return;
  bytes_ -= it->second->bytes;
  slots_.erase(it->second);
  by_key_.erase(it);
}

}  // namespace ditfleet::kernel_cache
