#include "coordinator/scheduling/service/redis_check.h"

#include "shared/core/text.h"
#include "shared/redis/info.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::scheduling {
namespace {

std::string mended_by(const std::string& setting) {
  return "; run 'redis-cli CONFIG SET " + setting + "' and add '" + setting + "' to redis.conf";
}

}  // namespace

RedisCheck check_redis(std::string_view info, const std::string& where, bool allow_eviction) {
  static const telemetry::Gauges append_only("ditfleet_redis_append_only"), evicts("ditfleet_redis_evicts"),
      used("ditfleet_redis_used_memory_bytes"), most("ditfleet_redis_max_memory_bytes");
  const std::string policy(redis::info_value(info, "maxmemory_policy")), server = "Redis at " + where;
  const bool evicts_all = policy.starts_with("allkeys-"), evicts_some = policy.starts_with("volatile-");
  const bool no_file = redis::info_value(info, "aof_enabled") == "0";
  append_only().Set(no_file ? 0 : 1);
  evicts().Set(evicts_all || evicts_some ? 1 : 0);
  used().Set(static_cast<double>(leading_integer(redis::info_value(info, "used_memory"))));
  most().Set(static_cast<double>(leading_integer(redis::info_value(info, "maxmemory"))));

  RedisCheck out;
  if (evicts_all || evicts_some) {
    const std::string why = server + " deletes " + (evicts_all ? "jobs" : "results, uploads and idempotency keys") +
                            " when its memory is full (maxmemory-policy is " + policy + ")" +
                            mended_by("maxmemory-policy noeviction");
    if (evicts_all && !allow_eviction) {
      out.refusal = why + "; redis.allow_eviction accepts it";
    } else {
      out.warnings.push_back(why);
    }
  }
  if (no_file)
    out.warnings.push_back(server + " has no append-only file and loses the latest jobs when it restarts" +
                           mended_by("appendonly yes"));
  return out;
}

}  // namespace ditfleet::scheduling
