#include "shared/kernel_cache/counters.h"

#include <string>

#include "shared/telemetry/metrics.h"

namespace ditfleet::kernel_cache {

using telemetry::Counters;

void count_lookup(std::string_view tier, std::string_view result, double times) {
  static const Counters series("ditfleet_kernel_cache_lookups_total");
  series({tier, result}).Increment(times);
}

void count_store(std::string_view tier, std::string_view result, double times) {
  static const Counters series("ditfleet_kernel_cache_stores_total");
  series({tier, result}).Increment(times);
}

void count_quarantined(std::string_view tier, std::string_view reason, double times) {
  static const Counters series("ditfleet_kernel_cache_quarantined_total");
  series({tier, reason}).Increment(times);
}

void count_compile(std::string_view result, double times) {
  static const Counters series("ditfleet_kernel_cache_compiles_total");
  series({result}).Increment(times);
}

void count_wait(std::string_view result) {
  static const Counters series("ditfleet_kernel_cache_waits_total");
  series({result}).Increment();
}

void count_breaker_opened(double times) {
  static const Counters series("ditfleet_kernel_cache_breaker_opened_total");
  series().Increment(times);
}

void show_breaker(double open) {
  static const telemetry::Gauges series("ditfleet_kernel_cache_breaker_open");
  series().Set(open);
}

void show_counters(bool disk, bool redis) {
  for (const char* result : {"hit", "miss"}) {
    count_lookup("memory", result, 0);
    if (disk) count_lookup("disk", result, 0);
    if (redis) count_lookup("redis", result, 0);
  }
  for (const char* result : {"stored", "error"}) {
    if (disk) count_store("disk", result, 0);
    if (redis) count_store("redis", result, 0);
  }
  for (const char* reason : {"corrupt", "unusable"}) {
    if (disk) count_quarantined("disk", reason, 0);
    if (redis) count_quarantined("redis", reason, 0);
  }
  for (const char* result : {"ok", "error"}) count_compile(result, 0);
  if (!redis) return;
  count_breaker_opened(0);
  show_breaker(0);
}

}  // namespace ditfleet::kernel_cache
