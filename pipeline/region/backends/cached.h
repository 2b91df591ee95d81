// Compiling through the kernel cache. Its own header keeps the cache's (and with it Asio's) out of others.
#pragma once

#include <memory>

#include "pipeline/region/backends/compiler.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::region {

// A cache in this process's memory alone.
std::shared_ptr<kernel_cache::KernelCache> make_memory_cache();

struct CachedProgram {
  std::shared_ptr<const Entry> entry;
  bool compiled = false;  // here and now; else some tier had it
};

// The program of plan and source for arch, from the nearest tier or the compiler. Errors are the compiler's.
// Thread safe; blocks as KernelCache::get_or_compile does.
Result<CachedProgram> compile_cached(kernel_cache::KernelCache& cache, const Plan& plan, const Source& source, const Compiler& compiler, const std::string& arch);
// The same of any source, whose key and name are the caller's.
Result<CachedProgram> compile_cached(kernel_cache::KernelCache& cache, const kernel_cache::Key& key, const std::string& name, const Source& source,
                                     const Compiler& compiler, const std::string& arch);

}  // namespace ditfleet::region
