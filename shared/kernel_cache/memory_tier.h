// The programs of this process, evicted least recently used first.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "shared/kernel_cache/entry.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::kernel_cache {

// Thread-safe. Takes a mutex, but does no I/O.
class MemoryTier {
 public:
  explicit MemoryTier(std::uint64_t max_bytes) : max_bytes_(max_bytes) {}

  std::shared_ptr<const Entry> find(const Key& key);  // null if absent
  // Replaces the key's entry. Does not keep an entry that alone exceeds the limit.
  void put(const Key& key, std::shared_ptr<const Entry> entry);
  // Removes `entry` if it is stored under `key`.
  void erase(const Key& key, const std::shared_ptr<const Entry>& entry);

 private:
  struct Slot {
    Key key;
    std::shared_ptr<const Entry> entry;
    std::uint64_t bytes;
  };
  void erase_locked(const Key& key);

  std::mutex mutex_;
  const std::uint64_t max_bytes_;
  std::uint64_t bytes_ = 0;
  std::list<Slot> slots_;  // most recently used first
  std::unordered_map<Key, std::list<Slot>::iterator> by_key_;
};

}  // namespace ditfleet::kernel_cache
