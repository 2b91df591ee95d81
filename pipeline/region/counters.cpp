#include "pipeline/region/counters.h"

#include <spdlog/spdlog.h>

#include "shared/telemetry/metrics.h"

namespace ditfleet::region {

namespace {

telemetry::Handle<prometheus::Counter> compiles(std::string_view backend, std::string_view reason) {
  static const telemetry::Counters series("ditfleet_region_compiles_total");
  return series({backend, reason});
}

telemetry::Handle<prometheus::Histogram> seconds(std::string_view backend, bool built) {
  static const telemetry::Histograms series("ditfleet_region_program_seconds");
  return series({backend, built ? "compiled" : "cache"});
}

telemetry::Handle<prometheus::Counter> recompiles() {
  static const telemetry::Counters series("ditfleet_recompiles_total");
  return series();
}

telemetry::Handle<prometheus::Counter> variants() {
  static const telemetry::Counters series("ditfleet_region_variants_total");
  return series();
}

telemetry::Handle<prometheus::Counter> fallbacks(std::string_view reason) {
  static const telemetry::Counters series("ditfleet_region_fallbacks_total");
  return series({reason});
}

}  // namespace

void RegionCounters::show(std::string_view backend) const {
  compiles(backend, "first");
  for (const char* guard : {"shape", "dtype", "device"}) compiles(backend, guard);
  recompiles();
  for (const bool built : {true, false}) seconds(backend, built);
  variants();
  for (const char* reason :
       {"no_compiler", "unsupported_device", "unsupported_op", "compile_error", "recompile_limit", "adapters"})
    fallbacks(reason);
}

void RegionCounters::program_took(std::string_view backend, std::string_view reason, bool built,
                                  std::chrono::microseconds time) {
  seconds(backend, built).Observe(static_cast<double>(time.count()) * 1e-6);
  if (!built) return;
  compiles(backend, reason).Increment();
  add(&RegionCounts::built);
  add(&RegionCounts::compile_us, static_cast<std::uint64_t>(time.count()));
}

void RegionCounters::recompiled(std::string_view region, std::string_view guard) {
  recompiles().Increment();
  add(&RegionCounts::recompiles);
  spdlog::warn("region {} is compiled again: {}", std::string(region), std::string(guard));
}

void RegionCounters::variant() {
  variants().Increment();
  add(&RegionCounts::variants);
}

void RegionCounters::fell_back(std::string_view region, std::string_view reason, std::string_view message, bool first) {
  fallbacks(reason).Increment();
  if (first)
    spdlog::warn("region {} runs eagerly ({}): {}", std::string(region), std::string(reason), std::string(message));
  std::lock_guard lock(mutex_);
  ++counts_.fallbacks;
  ++counts_.fallback_reasons[std::string(reason)];
}

RegionCounts RegionCounters::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

void RegionCounters::add(std::uint64_t RegionCounts::*count, std::uint64_t by) {
  std::lock_guard lock(mutex_);
  counts_.*count += by;
}

}  // namespace ditfleet::region
