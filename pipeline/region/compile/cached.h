// Compiling through the kernel cache. Its own header keeps the cache's (and with it Asio's) out of others.
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

// A cache in this process's memory alone.
std::shared_ptr<kernel_cache::KernelCache> make_memory_cache();

struct CachedProgram {
  std::shared_ptr<const Entry> entry;
  bool compiled = false;  // here and now; else some tier had it
};

// See KernelCache::Validator; empty: any program is usable.
using Validator = std::function<Result<void>(const Entry&)>;

// The program of plan and source for arch, from the nearest tier or the compiler. Errors are the compiler's, and
// usable's of what it made. Thread safe; blocks as KernelCache::get_or_compile does.
Result<CachedProgram> compile_cached(kernel_cache::KernelCache& cache, const Plan& plan, const Source& source,
                                     const Compiler& compiler, const std::string& arch, const Validator& usable = {});
// The same of any source, whose key and name are the caller's.
Result<CachedProgram> compile_cached(kernel_cache::KernelCache& cache, const kernel_cache::Key& key,
                                     const std::string& name, const Source& source, const Compiler& compiler,
                                     const std::string& arch, const Validator& usable = {});

// What `load`, Entry → Result<Module>, makes of what `compile`, Validator → Result<CachedProgram>, brings. A program
// from the cache that `load` refuses as no program (kDataCorrupt) is replaced in the cache by a new one that it takes;
// its other errors (no memory, a device that fails) are the caller's alone, and say nothing of the program.
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
  if (loaded != made->entry.get()) module.emplace(load(*made->entry));  // another thread brought it
  return std::move(*module);
}

}  // namespace ditfleet::region
