#include "worker/adapters/metrics.h"

#include "shared/telemetry/metrics.h"

namespace ditfleet::worker {
namespace {

const prometheus::Histogram::BucketBoundaries kLoadSeconds{0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
                                                           0.2,    0.5,   1,     2,     5,    10,   30};

void set(prometheus::Family<prometheus::Gauge>& family, const std::string& model, double value) {
  family.Add({{"model", model}}).Set(value);
}

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
  static auto& family =
      telemetry::counters("ditfleet_lora_loads_total",
                          "LoRA adapters that units needed, by where this worker had them (slot, host, disk, source)");
  family.Add({{"tier", std::string(tier_name(tier))}, {"result", std::string(result)}}).Increment();
}

void observe_adapter_load(AdapterTier furthest, std::chrono::microseconds took) {
  static auto& family = telemetry::histograms(
      "ditfleet_lora_load_seconds",
      "Time from a unit's arrival until its LoRA adapters are loaded, by the slowest tier among them");
  family.Add({{"tier", std::string(tier_name(furthest))}}, kLoadSeconds)
      .Observe(static_cast<double>(took.count()) * 1e-6);
}

void count_adapter_bytes(const std::string& source, std::int64_t bytes) {
  static auto& family = telemetry::counters("ditfleet_lora_fetched_bytes_total",
                                            "Bytes of LoRA adapters copied to this host, by source (redis, file)");
  family.Add({{"source", source}}).Increment(static_cast<double>(bytes));
}

void set_adapter_cache_bytes(std::int64_t bytes) {
  static auto& family =
      telemetry::gauges("ditfleet_lora_cache_bytes", "Bytes of LoRA adapter files on this host's disk");
  family.Add({}).Set(static_cast<double>(bytes));
}

void set_adapter_residency(const std::string& model, const pipeline::AdapterHoldings& held) {
  static auto& slots = telemetry::gauges("ditfleet_lora_slots", "LoRA adapter slots on the device");
  static auto& used = telemetry::gauges("ditfleet_lora_slots_used", "LoRA adapter slots in use");
  static auto& host = telemetry::gauges("ditfleet_lora_host_adapters", "LoRA adapters in host memory");
  static auto& swap =
      telemetry::gauges("ditfleet_lora_swap_seconds",
                        "Measured time to copy a LoRA adapter from host memory to a slot; 0: not measured yet");
  set(slots, model, held.slots);
  set(used, model, static_cast<double>(held.in_slots.size()));
  set(host, model, static_cast<double>(held.in_host.size()));
  set(swap, model, static_cast<double>(held.swap_us) * 1e-6);
}

}  // namespace ditfleet::worker
