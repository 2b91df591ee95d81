// What the cache did, as Prometheus counters of the process:
//   ditfleet_kernel_cache_lookups_total{tier,result}       tier: memory, disk, redis; result: hit, miss, error,
//                                                          left_out (breaker), or a refusal's name (codec.h)
//   ditfleet_kernel_cache_stores_total{tier,result}        result: stored, already, full, error, left_out
//   ditfleet_kernel_cache_quarantined_total{tier,reason}
//   ditfleet_kernel_cache_compiles_total{result}           result: ok, error
//   ditfleet_kernel_cache_waits_total{result}              for another process that compiles: hit, took_over, timeout,
//                                                          error
//   ditfleet_kernel_cache_breaker_opened_total, ditfleet_kernel_cache_breaker_open (1, 0.5 half open, 0)
// A new cache exports the counters that any use of its tiers changes, at zero. The others appear with their first
// event.
#pragma once

#include <string_view>

namespace ditfleet::kernel_cache {

// Thread-safe.
void show_counters(bool disk, bool redis);
void count_lookup(std::string_view tier, std::string_view result, double times = 1);
void count_store(std::string_view tier, std::string_view result, double times = 1);
void count_quarantined(std::string_view tier, std::string_view reason);
void count_compile(std::string_view result, double times = 1);
void count_wait(std::string_view result);
void count_breaker_opened(double times = 1);
void show_breaker(double open);

}  // namespace ditfleet::kernel_cache
