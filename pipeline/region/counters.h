// Counts events of regions, for one engine and as Prometheus counters of the process:
//
//   ditfleet_region_compiles_total{backend,reason}   programs compiled here, not found in the kernel cache; reason:
//                                                    first, or the guard that failed (shape, dtype, device)
//   ditfleet_region_program_seconds{backend,source}  time until a program was available; source: compiled or cache
//   ditfleet_recompiles_total                        programs beyond a region's first; a warning names the guard
//   ditfleet_region_variants_total                   sizes seen for the first time; they need no compilation
//   ditfleet_region_fallbacks_total{reason}          decisions to run eagerly, not calls. A component: no_compiler,
//                                                    unsupported_device. A region's program: unsupported_op,
//                                                    compile_error, recompile_limit. A request: adapters.
//
// An engine exports all counters from its start, so that zero differs from "not scraped".
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace ditfleet::region {

struct RegionCounts {
  std::uint64_t compiles = 0;    // programs of regions, from the kernel cache or compiled, first ones included
  std::uint64_t built = 0;       // programs that this process compiled, hand-written ones included
  std::uint64_t compile_us = 0;  // time in the compiler, summed over threads
  std::uint64_t recompiles = 0;
  std::uint64_t hits = 0;    // calls whose guard held
  std::uint64_t misses = 0;  // calls whose guard failed; a variant or a compilation followed
  std::uint64_t variants = 0;
  std::uint64_t fallbacks = 0;
  std::map<std::string, std::uint64_t> fallback_reasons;
};

// Thread-safe.
class RegionCounters {
 public:
  // Registers the process's counters; `backend` may be "eager".
  void show(std::string_view backend) const;
  // A program was available after `time`: `built` here, else from the kernel cache. `reason`: why it was requested.
  void program_took(std::string_view backend, std::string_view reason, bool built, std::chrono::microseconds time);
  // A region has a new program.
  void has_program() { add(&RegionCounts::compiles); }
  // Logs a warning with the region and the guard, because a warm process should not recompile.
  void recompiled(std::string_view region, std::string_view guard);
  void hit() { add(&RegionCounts::hits); }
  void missed() { add(&RegionCounts::misses); }
  void variant();
  // Logs the message if this is the first fallback of this region and reason (`first`).
  void fell_back(std::string_view region, std::string_view reason, std::string_view message, bool first);
  RegionCounts counts() const;

 private:
  void add(std::uint64_t RegionCounts::*count, std::uint64_t by = 1);

  mutable std::mutex mutex_;
  RegionCounts counts_;
};

}  // namespace ditfleet::region
