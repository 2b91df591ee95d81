// The cache's Prometheus metrics:
//   ditfleet_kernel_cache_lookups_total{tier,result}       tier: memory, disk, redis; result: hit, miss, error,
//                                                          left_out (by the breaker), or refusal_name() (codec.h)
//   ditfleet_kernel_cache_stores_total{tier,result}        result: stored, already, full, error, left_out
//   ditfleet_kernel_cache_quarantined_total{tier,reason}
//   ditfleet_kernel_cache_compiles_total{result}           result: ok, error
//   ditfleet_kernel_cache_waits_total{result}              waits for another compiling process: hit, took_over,
//                                                          timeout, error
//   ditfleet_kernel_cache_breaker_opened_total
//   ditfleet_kernel_cache_breaker_open                     0 = closed, 0.5 = half open, 1 = open
// A new cache exports the counters of normal operation as zero. Other counters appear with their first event.
#pragma once

#include <string_view>

namespace ditfleet::kernel_cache {

// Thread-safe.
void show_counters(bool disk, bool redis);
void count_lookup(std::string_view tier, std::string_view result, double times = 1);
void count_store(std::string_view tier, std::string_view result, double times = 1);
void count_quarantined(std::string_view tier, std::string_view reason, double times = 1);
void count_compile(std::string_view result, double times = 1);
void count_wait(std::string_view result);
void count_breaker_opened(double times = 1);
void show_breaker(double open);

}  // namespace ditfleet::kernel_cache
