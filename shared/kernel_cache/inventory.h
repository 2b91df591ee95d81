// The entries on disk and in Redis, for `ditfleet cache`.
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

// A stored entry: its encoding, and the result of decoding it.
struct Stored {
  Tier tier = Tier::kDisk;
  Key key;
  std::int64_t used_ms = 0;
  std::string bytes;
  Decoded decoded{Refused{}};

  // Signed with another secret: other nodes may be able to use it.
  bool foreign() const { return !decoded && decoded.error().why == Refusal::kForeignSecret; }
};

// Not thread-safe. All calls block.
class Inventory {
 public:
  // Uses the tiers in `options`, which are those of cache_options().
  explicit Inventory(const CacheOptions& options);

  const DiskTier* disk() const { return disk_.get(); }
  const RedisTier* redis() const { return redis_.get(); }

  // Reads and verifies every entry, first on disk and then in Redis. If a tier cannot be read, visits the entries of
  // the other tier and then returns the error.
  Result<void> each(bool with_disk, bool with_redis, const std::function<void(const Stored&)>& visit);
  // Returns whether the entry still existed. After an error, the entry still exists.
  Result<bool> remove(const Stored& stored);
  std::size_t empty_quarantine(Result<void>& emptied) { return disk_ ? disk_->empty_quarantine(emptied) : 0; }

 private:
  std::shared_ptr<const Secret> secret_;
  std::unique_ptr<DiskTier> disk_;
  std::unique_ptr<RedisTier> redis_;
};

}  // namespace ditfleet::kernel_cache
