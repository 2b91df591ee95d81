// Compiles through the kernel cache. A separate header, so that other headers do not include the cache and Asio.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "pipeline/region/compile/compiler.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::region {

// A cache in this process's memory only.
std::shared_ptr<kernel_cache::KernelCache> make_memory_cache();

struct CachedProgram {
  std::shared_ptr<const Entry> entry;
  bool compiled = false;  // by this call; false: the cache had it
};

// Whether this process can use a program (see KernelCache::get_or_compile); empty: accepts any program.
using Validator = std::function<Result<void>(const Entry&)>;

// Returns the program with this key from the cache, or compiles `source` under this name. Errors: the compiler's, and
// those of `usable` for a program that was just compiled. Thread-safe; blocks as KernelCache::get_or_compile does.
Result<CachedProgram> compile_cached(kernel_cache::KernelCache& cache, const kernel_cache::Key& key,
                                     const std::string& name, const Source& source, const Compiler& compiler,
                                     const std::string& arch, const Validator& usable = {});

// Loads a program: `compile` (Validator → Result<CachedProgram>) finds it, `load` (Entry → Result<Module>) loads it. If
// `load` rejects a cached program with kDataCorrupt, the program is compiled again and replaced in the cache. Other
// errors of `load` (out of memory, a failed device) are returned and do not affect the cache.
template <class Compile, class Load>
auto load_cached(const Compile& compile, const Load& load) -> std::invoke_result_t<Load, const Entry&> {
  std::optional<std::invoke_result_t<Load, const Entry&>> module;
  const Entry* loaded = nullptr;
  const Result<CachedProgram> made = compile([&](const Entry& entry) -> Result<void> {
    module.emplace(load(entry));
    loaded = &entry;
    if (!*module && module->error().code == Code::kDataCorrupt) return module->error();
    return {};
  });
  if (!made) return made.error();
  if (loaded != made->entry.get()) module.emplace(load(*made->entry));  // found by another thread
  return std::move(*module);
}

}  // namespace ditfleet::region
