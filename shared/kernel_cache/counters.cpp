#include "shared/kernel_cache/counters.h"

#include <string>

#include "shared/telemetry/metrics.h"

namespace ditfleet::kernel_cache {

namespace {

using telemetry::counters;

prometheus::Counter& lookups(std::string_view tier, std::string_view result) {
  static auto& family =
      counters("ditfleet_kernel_cache_lookups_total", "Lookups of compiled programs, by tier and what came of them");
  return family.Add({{"tier", std::string(tier)}, {"result", std::string(result)}});
}

prometheus::Counter& stores(std::string_view tier, std::string_view result) {
  static auto& family = counters("ditfleet_kernel_cache_stores_total", "Compiled programs written to a tier");
  return family.Add({{"tier", std::string(tier)}, {"result", std::string(result)}});
}

prometheus::Counter& quarantined(std::string_view tier, std::string_view reason) {
  static auto& family = counters("ditfleet_kernel_cache_quarantined_total",
                                 "Values that did not verify or could not be used and were set aside");
  return family.Add({{"tier", std::string(tier)}, {"reason", std::string(reason)}});
}

prometheus::Counter& compiles(std::string_view result) {
  static auto& family =
      counters("ditfleet_kernel_cache_compiles_total", "Programs that no tier had and that were compiled here");
  return family.Add({{"result", std::string(result)}});
}

prometheus::Counter& waits(std::string_view result) {
  static auto& family =
      counters("ditfleet_kernel_cache_waits_total", "Waits for another process that compiles the same program");
  return family.Add({{"result", std::string(result)}});
}

prometheus::Counter& breaker_opened() {
  static auto& family =
      counters("ditfleet_kernel_cache_breaker_opened_total", "How often the cache began to leave Redis out");
  return family.Add({});
}

prometheus::Gauge& breaker_open() {
  static auto& family = telemetry::gauges("ditfleet_kernel_cache_breaker_open",
                                          "Whether the cache leaves Redis out: 1, 0.5 while it probes, 0");
  return family.Add({});
}

}  // namespace

void show_counters(bool disk, bool redis) {
  for (const char* tier : {"memory", "disk", "redis"}) {
    const bool memory = tier == std::string_view("memory");
    if (!memory && !(tier == std::string_view("disk") ? disk : redis)) continue;
    for (const char* result : {"hit", "miss"}) lookups(tier, result);
    if (!memory)
      for (const char* result : {"stored", "error"}) stores(tier, result);
  }
  for (const char* result : {"ok", "error"}) compiles(result);
  if (!redis) return;
  breaker_opened();
  breaker_open();
}

void count_lookup(std::string_view tier, std::string_view result) { lookups(tier, result).Increment(); }
void count_store(std::string_view tier, std::string_view result) { stores(tier, result).Increment(); }
void count_quarantined(std::string_view tier, std::string_view reason) { quarantined(tier, reason).Increment(); }
void count_compile(std::string_view result) { compiles(result).Increment(); }
void count_wait(std::string_view result) { waits(result).Increment(); }
void count_breaker_opened() { breaker_opened().Increment(); }
void show_breaker(double open) { breaker_open().Set(open); }

}  // namespace ditfleet::kernel_cache
