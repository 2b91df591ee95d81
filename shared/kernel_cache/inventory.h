// What disk and Redis hold, for those who look after a fleet: `ditfleet cache`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"
#include "shared/kernel_cache/cache.h"
#include "shared/kernel_cache/codec.h"
#include "shared/kernel_cache/disk_tier.h"
#include "shared/kernel_cache/redis_tier.h"

namespace ditfleet::kernel_cache {

enum class Tier { kDisk, kRedis };
std::string_view tier_name(Tier tier);  // "disk", "redis"

// One stored value and what it turned out to be.
struct Stored {
  Tier tier = Tier::kDisk;
  Name name = Name::kShared;
  Key key;
  std::int64_t used_ms = 0;
  std::string bytes;
  Decoded decoded{Refused{}};

  // Of another secret, where a value of that secret has its place: this node can neither check nor use it, and to those
  // who can it may be right (README.md, "Another secret's values").
  bool of_others() const {
    return name == Name::kShared && !decoded && decoded.refused().why == Refusal::kForeignSecret;
  }
};

// Not thread safe. All calls block.
class Inventory {
 public:
  // The tiers that `options` has, as cache_options() gives them.
  explicit Inventory(const CacheOptions& options);

  const DiskTier* disk() const { return disk_.get(); }
  const RedisTier* redis() const { return redis_.get(); }

  // Reads and verifies every value, disk first. What another process removes meanwhile is left out. A tier that
  // cannot be read is an error, after what was readable.
  Result<void> each(bool with_disk, bool with_redis, const std::function<void(const Stored&)>& visit);
  // Adds a value that has been verified, replacing what is there on disk; a good one in Redis stays, and another
  // secret's in both.
  Result<void> put(Tier tier, const Key& key, std::string_view bytes);
  // Whether it was still there. An error: it still is.
  Result<bool> remove(const Stored& stored);
  std::size_t empty_quarantine(Result<void>& emptied) { return disk_ ? disk_->empty_quarantine(emptied) : 0; }

 private:
  std::shared_ptr<const Secret> secret_;
  std::unique_ptr<DiskTier> disk_;
  std::unique_ptr<RedisTier> redis_;
};

}  // namespace ditfleet::kernel_cache
