#include "shared/kernel_cache/inventory.h"

#include <utility>

namespace ditfleet::kernel_cache {

std::string_view tier_name(Tier tier) { return tier == Tier::kDisk ? "disk" : "redis"; }

Inventory::Inventory(const CacheOptions& options) : secret_(options.secret) {
  if (!secret_) return;
  if (!options.dir.empty()) disk_ = std::make_unique<DiskTier>(options.dir, options.disk_bytes);
  if (options.redis) redis_ = std::make_unique<RedisTier>(options);
}

Result<void> Inventory::each(bool with_disk, bool with_redis, const std::function<void(const Stored&)>& visit) {
  Result<void> done;
  const auto show = [&](Stored stored, std::string bytes) {
    stored.bytes = std::move(bytes);
    stored.decoded = decode(stored.bytes, stored.key, "", *secret_);
    visit(stored);
  };
  if (with_disk && disk_) {
    for (const DiskTier::File& file : disk_->list(&done)) {
      Stored stored;
      stored.key = file.key;
      stored.used_ms = file.used_ms;
      auto bytes = disk_->read(file.key);
      if (!bytes)
        done = bytes.error();
      else if (*bytes)
        show(std::move(stored), std::move(**bytes));
    }
  }
  if (with_redis && redis_) {
    auto listed = redis_->list();
    if (!listed) return listed.error();
    for (const RedisTier::Listed& value : *listed) {
      Stored stored;
      stored.tier = Tier::kRedis;
      stored.key = value.key;
      stored.used_ms = value.used_ms;
      auto found = redis_->fetch(value.key);
      if (!found) return found.error();
      if (*found) show(std::move(stored), std::move((*found)->bytes));
    }
  }
  return done;
}

Result<bool> Inventory::remove(const Stored& stored) {
  return stored.tier == Tier::kDisk ? disk_->remove(stored.key) : redis_->remove(stored.key);
}

}  // namespace ditfleet::kernel_cache
