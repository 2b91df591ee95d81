// The state that the regions of one engine share: compiler, kernel cache, libraries, counters.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "pipeline/region/compile/cached.h"
#include "pipeline/region/counters.h"
#include "pipeline/region/options.h"
#include "pipeline/region/run/executor.h"

namespace ditfleet::pipeline::parallel {
class Group;
}

namespace ditfleet::region {

// make_region_host() fills it in. Users share it as const; all of its const members are thread-safe.
struct RegionHost {
  CompileOptions options;
  std::shared_ptr<const Compiler> compiler;  // null: eager
  std::string arch;
  int device = 0;  // a GPU's index
  std::shared_ptr<kernel_cache::KernelCache> cache;
  std::shared_ptr<RegionCounters> counters = std::make_shared<RegionCounters>();
  std::shared_ptr<const Gemm> gemm;  // null: LibTorch's
  AttentionBackend attention = AttentionBackend::kAuto;
  std::shared_ptr<const DirectAttention> direct_attention;  // null: LibTorch's alone
  mutable WorkspacePool pool;
  std::shared_ptr<pipeline::parallel::Group> ranks;  // that share each forward of a transformer; null: one process
  bool dry = false;                                  // for tensors without memory: nothing is compiled or counted
  // The clock for the pause after a failed compilation; tests replace it.
  std::function<std::chrono::steady_clock::time_point()> now = &std::chrono::steady_clock::now;

  bool compiles_blocks() const { return compiler && options.transformer; }
  // Counts a region that cannot run compiled, and logs the first one of this region and reason. With fullgraph it
  // throws a Failure instead: kInvalidArgument, param "compile.fullgraph".
  void fall_back(const std::string& region, const std::string& reason, const std::string& message) const;
  // compile_cached() for this host. Counts how long it took; `reason`: see RegionCounters.
  Result<CachedProgram> compile(const kernel_cache::Key& key, const std::string& name, const Source& source,
                                const std::string& reason, const Validator& usable) const;

 private:
  mutable std::mutex mutex_;
  mutable std::set<std::pair<std::string, std::string>> fallen_back_;
};

// Opens the compiler for this backend and device. Creates a cache in memory if `cache` is null. Counts a fallback if
// backend auto becomes eager.
// Throws pipeline::Failure: kInvalidArgument for a backend or attention that the device cannot have; kUnavailable if an
// explicit backend is not available. The configuration has checked names and limits.
std::shared_ptr<RegionHost> make_region_host(CompileOptions options, c10::Device device,
                                             std::shared_ptr<kernel_cache::KernelCache> cache);

// A host for the same programs on tensors without memory (meta).
std::shared_ptr<RegionHost> make_dry_host(const RegionHost& host);

}  // namespace ditfleet::region
