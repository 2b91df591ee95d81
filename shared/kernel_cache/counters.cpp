#include "shared/kernel_cache/counters.h"

#include <string>

#include "shared/telemetry/metrics.h"

namespace ditfleet::kernel_cache {

void count_lookup(std::string_view tier, std::string_view result) {
  static auto& family = telemetry::counters("ditfleet_kernel_cache_lookups_total", "Lookups of compiled programs, by tier and what came of them");
  family.Add({{"tier", std::string(tier)}, {"result", std::string(result)}}).Increment();
}

void count_store(std::string_view tier, std::string_view result) {
  static auto& family = telemetry::counters("ditfleet_kernel_cache_stores_total", "Compiled programs written to a tier");
  family.Add({{"tier", std::string(tier)}, {"result", std::string(result)}}).Increment();
}

void count_quarantined(std::string_view tier, std::string_view reason) {
  static auto& family = telemetry::counters("ditfleet_kernel_cache_quarantined_total", "Values that did not verify and were set aside");
  family.Add({{"tier", std::string(tier)}, {"reason", std::string(reason)}}).Increment();
}

void count_compile(std::string_view result) {
  static auto& family = telemetry::counters("ditfleet_kernel_cache_compiles_total", "Programs that no tier had and that were compiled here");
  family.Add({{"result", std::string(result)}}).Increment();
}

void count_wait(std::string_view result) {
  static auto& family = telemetry::counters("ditfleet_kernel_cache_waits_total", "Waits for another process that compiles the same program");
  family.Add({{"result", std::string(result)}}).Increment();
}

void count_breaker_opened() {
  static auto& family = telemetry::counters("ditfleet_kernel_cache_breaker_opened_total", "How often the cache began to leave Redis out");
  family.Add({}).Increment();
}

void show_breaker(double open) {
  static auto& family = telemetry::gauges("ditfleet_kernel_cache_breaker_open", "Whether the cache leaves Redis out: 1, 0.5 while it probes, 0");
  family.Add({}).Set(open);
}

}  // namespace ditfleet::kernel_cache
