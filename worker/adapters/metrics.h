// What adapters cost and where they are, as metrics of the process:
//   ditfleet_lora_loads_total{tier,result}    adapters that units needed, by where the worker had them: slot, host,
//   disk (a
//                                             copy on this host) or source (fetched); result: ok, or the error's code
//   ditfleet_lora_load_seconds{tier}          of a unit: from its arrival until its adapters were brought, by the tier
//   of
//                                             the one that was furthest away
//   ditfleet_lora_swap_seconds{model}         from host memory to a slot, as the engine measured it
//   ditfleet_lora_slots{model}, ditfleet_lora_slots_used{model}, ditfleet_lora_host_adapters{model}
//   ditfleet_lora_fetched_bytes_total{source} source: redis, file
//   ditfleet_lora_cache_bytes                 of the copies on this host's disk
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "pipeline/engine.h"

namespace ditfleet::worker {

enum class AdapterTier { kSlot, kHost, kDisk, kSource };  // the nearest first
std::string_view tier_name(AdapterTier tier);

// All thread safe.
void count_adapter_load(AdapterTier tier, std::string_view result);
void observe_adapter_load(AdapterTier furthest, std::chrono::microseconds took);
void count_adapter_bytes(const std::string& source, std::int64_t bytes);
void show_adapter_cache(std::int64_t bytes);
void show_adapters(const std::string& model, const pipeline::AdapterHoldings& holdings);

}  // namespace ditfleet::worker
