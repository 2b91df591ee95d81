// Prometheus metrics about adapters:
//   ditfleet_lora_loads_total{tier,result}     adapters that units needed; tier: where the adapter was before: slot,
//                                              host, disk (a copy on this host) or source (fetched); result: ok or an
//                                              error code
//   ditfleet_lora_load_seconds{tier}           time to load a unit's adapters; tier: the slowest of their tiers
//   ditfleet_lora_swap_seconds{model}          time from host memory to a slot, measured by the engine
//   ditfleet_lora_slots{model}, ditfleet_lora_slots_used{model}, ditfleet_lora_host_adapters{model}
//   ditfleet_lora_fetched_bytes_total{source}  source: redis, file
//   ditfleet_lora_cache_bytes                  adapter files on this host's disk
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "pipeline/engine.h"

namespace ditfleet::worker {

enum class AdapterTier { kSlot, kHost, kDisk, kSource };  // nearest first
std::string_view tier_name(AdapterTier tier);

// All are thread-safe.
void count_adapter_load(AdapterTier tier, std::string_view result);
void observe_adapter_load(AdapterTier furthest, std::chrono::microseconds took);
void count_adapter_bytes(const std::string& source, std::int64_t bytes);
void set_adapter_cache_bytes(std::int64_t bytes);
void set_adapter_residency(const std::string& model, const pipeline::AdapterHoldings& held);

}  // namespace ditfleet::worker
