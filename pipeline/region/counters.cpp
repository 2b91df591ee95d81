#include "pipeline/region/counters.h"

#include <spdlog/spdlog.h>

#include "shared/telemetry/metrics.h"

namespace ditfleet::region {

namespace {

using telemetry::counters;

prometheus::Counter& compiles(std::string_view backend, std::string_view reason) {
  static auto& family = counters("ditfleet_region_compiles_total",
                                 "Programs compiled by this process, without those from the kernel cache");
  return family.Add({{"backend", std::string(backend)}, {"reason", std::string(reason)}});
}

prometheus::Histogram& seconds(std::string_view backend, bool built) {
  static auto& family = telemetry::histograms("ditfleet_region_program_seconds",
                                              "Time until a region's program was available, by source");
  static const prometheus::Histogram::BucketBoundaries kSeconds{0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30};
  return family.Add({{"backend", std::string(backend)}, {"source", built ? "compiled" : "cache"}}, kSeconds);
}

prometheus::Counter& recompiles() {
  static auto& family = counters("ditfleet_recompiles_total", "Programs of regions beyond the first of each region");
  return family.Add({});
}

prometheus::Counter& variants() {
  static auto& family =
      counters("ditfleet_region_variants_total", "Sizes that a region ran for the first time, without compiling");
  return family.Add({});
}

prometheus::Counter& fallbacks(std::string_view reason) {
  static auto& family = counters("ditfleet_region_fallbacks_total",
                                 "Components, programs and requests that run eagerly instead, by reason");
  return family.Add({{"reason", std::string(reason)}});
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
