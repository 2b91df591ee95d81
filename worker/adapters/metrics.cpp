#include "worker/adapters/metrics.h"

#include "shared/telemetry/metrics.h"

namespace ditfleet::worker {
namespace {

void set(const telemetry::Gauges& gauges, const std::string& model, double value) { gauges({model}).Set(value); }

}  // namespace

std::string_view tier_name(AdapterTier tier) {
  switch (tier) {
    case AdapterTier::kSlot: return "slot";
    case AdapterTier::kHost: return "host";
    case AdapterTier::kDisk: return "disk";
    case AdapterTier::kSource: break;
  }
  return "source";
}

void count_adapter_load(AdapterTier tier, std::string_view result) {
  static const telemetry::Counters series("ditfleet_lora_loads_total");
  series({tier_name(tier), result}).Increment();
}

void observe_adapter_load(AdapterTier furthest, std::chrono::microseconds took) {
  static const telemetry::Histograms series("ditfleet_lora_load_seconds");
  series({tier_name(furthest)}).Observe(static_cast<double>(took.count()) * 1e-6);
}

void count_adapter_bytes(const std::string& source, std::int64_t bytes) {
  static const telemetry::Counters series("ditfleet_lora_fetched_bytes_total");
  series({source}).Increment(static_cast<double>(bytes));
}

void set_adapter_cache_bytes(std::int64_t bytes) {
  static const telemetry::Gauges series("ditfleet_lora_cache_bytes");
  series().Set(static_cast<double>(bytes));
}

void set_adapter_residency(const std::string& model, const pipeline::AdapterHoldings& held) {
  static const telemetry::Gauges slots("ditfleet_lora_slots");
  static const telemetry::Gauges used("ditfleet_lora_slots_used");
  static const telemetry::Gauges host("ditfleet_lora_host_adapters");
  static const telemetry::Gauges swap("ditfleet_lora_swap_seconds");
  set(slots, model, held.slots);
  set(used, model, static_cast<double>(held.in_slots.size()));
  set(host, model, static_cast<double>(held.in_host.size()));
  set(swap, model, static_cast<double>(held.swap_us) * 1e-6);
}

}  // namespace ditfleet::worker
