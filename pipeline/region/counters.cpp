#include "pipeline/region/counters.h"

#include <prometheus/counter.h>
#include <spdlog/spdlog.h>

#include "shared/telemetry/metrics.h"

namespace ditfleet::region {
namespace {

using Family = prometheus::Family<prometheus::Counter>;

Family& family(const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(telemetry::registry());
}

}  // namespace

void RegionCounters::compiled(std::string_view backend, std::string_view reason) {
  static Family& total = family("ditfleet_region_compiles_total", "Region programs compiled or taken from the kernel cache");
  total.Add({{"backend", std::string(backend)}, {"reason", std::string(reason)}}).Increment();
  compiles_.fetch_add(1, std::memory_order_relaxed);
}

void RegionCounters::recompiled(std::string_view region, std::string_view guard) {
  static Family& total = family("ditfleet_recompiles_total", "Region programs beyond a region's first");
  total.Add({}).Increment();
  recompiles_.fetch_add(1, std::memory_order_relaxed);
  spdlog::warn("region {} is compiled again: {}", std::string(region), std::string(guard));
}

void RegionCounters::variant() {
  static Family& total = family("ditfleet_region_variants_total", "Sizes that a region met for the first time, without a compile");
  total.Add({}).Increment();
  variants_.fetch_add(1, std::memory_order_relaxed);
}

void RegionCounters::fell_back(std::string_view region, std::string_view reason, std::string_view message, bool first) {
  static Family& total = family("ditfleet_region_fallbacks_total", "Calls and regions left to eager, by reason");
  total.Add({{"reason", std::string(reason)}}).Increment();
  if (first) spdlog::warn("region {} runs op by op ({}): {}", std::string(region), std::string(reason), std::string(message));
  std::lock_guard lock(mutex_);
  ++fallbacks_[std::string(reason)];
}

RegionCounts RegionCounters::counts() const {
  RegionCounts c;
  c.compiles = compiles_;
  c.recompiles = recompiles_;
  c.hits = hits_;
  c.misses = misses_;
  c.variants = variants_;
  std::lock_guard lock(mutex_);
  c.fallback_reasons = fallbacks_;
  for (const auto& [reason, count] : fallbacks_) c.fallbacks += count;
  return c;
}

}  // namespace ditfleet::region
