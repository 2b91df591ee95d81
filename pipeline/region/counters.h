// What regions did: a count of each kind for one engine, and the process's Prometheus counters
//   ditfleet_region_compiles_total{backend,reason}   programs that a compiler made here, none that the kernel cache
//   had; reason: first, or
//                                                    the guard that failed (shape, dtype, device)
//   ditfleet_region_program_seconds{backend,source}  until a program was there; source: compiled (here) or cache
//   ditfleet_recompiles_total                        programs beyond a region's first, wherever they came from; a
//   warning names the guard ditfleet_region_variants_total                   sizes seen for the first time: a plan's
//   numbers, no compile ditfleet_region_fallbacks_total{reason}          what runs op by op instead, counted when that
//   is decided and not with each call; reason:
//                                                    no_compiler,
//                                                    unsupported_device (a component), unsupported_op, compile_error,
//                                                    recompile_limit (a region's program), adapters (a request)
// An engine shows all of them from its start, at zero: what is absent cannot be told from what is not scraped.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace ditfleet::region {

struct RegionCounts {
  std::uint64_t compiles = 0;    // programs of regions, taken from the kernel cache or compiled, first ones included
  std::uint64_t built = 0;       // programs, also those of no region (fixed ones), that this process's compiler made
  std::uint64_t compile_us = 0;  // time in the compiler, of all threads together
  std::uint64_t recompiles = 0;
  std::uint64_t hits = 0;    // calls whose guard held
  std::uint64_t misses = 0;  // calls whose guard did not: a variant or a compile followed
  std::uint64_t variants = 0;
  std::uint64_t fallbacks = 0;
  std::map<std::string, std::uint64_t> fallback_reasons;
};

// Thread safe.
class RegionCounters {
 public:
  // Adds the process's counters as far as they are not there yet; "eager" is a backend, too.
  void show(std::string_view backend) const;
  // A program took `time` until it was there: `built` by the compiler here and now, else from the kernel cache.
  // `reason`: why it was asked for.
  void program_took(std::string_view backend, std::string_view reason, bool built, std::chrono::microseconds time);
  // A region runs it.
  void has_program() { compiles_.fetch_add(1, std::memory_order_relaxed); }
  // Logs a warning that names the region and the guard: in a warm process a recompile is a fault.
  void recompiled(std::string_view region, std::string_view guard);
  void hit() { hits_.fetch_add(1, std::memory_order_relaxed); }
  void missed() { misses_.fetch_add(1, std::memory_order_relaxed); }
  void variant();
  // `first`: the first time for this region and reason, which is logged.
  void fell_back(std::string_view region, std::string_view reason, std::string_view message, bool first);
  RegionCounts counts() const;

 private:
  std::atomic<std::uint64_t> compiles_{0}, built_{0}, compile_us_{0}, recompiles_{0}, hits_{0}, misses_{0},
      variants_{0};
  mutable std::mutex mutex_;
  std::map<std::string, std::uint64_t> fallbacks_;
};

}  // namespace ditfleet::region
