#include "shared/kernel_cache/counters.h"

#include <string>

#include "shared/telemetry/metrics.h"

namespace ditfleet::kernel_cache {

using telemetry::counters;

void count_lookup(std::string_view tier, std::string_view result, double times) {
  static auto& family =
      counters("ditfleet_kernel_cache_lookups_total", "Lookups of compiled programs, by tier and result");
  family.Add({{"tier", std::string(tier)}, {"result", std::string(result)}}).Increment(times);
}

void count_store(std::string_view tier, std::string_view result, double times) {
  static auto& family = counters("ditfleet_kernel_cache_stores_total", "Compiled programs written to a tier");
  family.Add({{"tier", std::string(tier)}, {"result", std::string(result)}}).Increment(times);
}

void count_quarantined(std::string_view tier, std::string_view reason) {
  static auto& family = counters("ditfleet_kernel_cache_quarantined_total",
                                 "Entries that failed verification or could not be loaded, copied to quarantine");
  family.Add({{"tier", std::string(tier)}, {"reason", std::string(reason)}}).Increment();
}

void count_compile(std::string_view result, double times) {
  static auto& family = counters("ditfleet_kernel_cache_compiles_total", "Programs compiled because no tier had them");
  family.Add({{"result", std::string(result)}}).Increment(times);
}

void count_wait(std::string_view result) {
  static auto& family =
      counters("ditfleet_kernel_cache_waits_total", "Waits for another process that compiles the same program");
  family.Add({{"result", std::string(result)}}).Increment();
}

void count_breaker_opened(double times) {
  static auto& family = counters("ditfleet_kernel_cache_breaker_opened_total",
                                 "Times the circuit breaker opened, so that the cache stopped using Redis");
  family.Add({}).Increment(times);
}

void show_breaker(double open) {
  static auto& family = telemetry::gauges("ditfleet_kernel_cache_breaker_open",
                                          "State of the circuit breaker for Redis: 0 closed, 0.5 half open, 1 open");
  family.Add({}).Set(open);
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
  for (const char* result : {"ok", "error"}) count_compile(result, 0);
  if (!redis) return;
  count_breaker_opened(0);
  show_breaker(0);
}

}  // namespace ditfleet::kernel_cache
