#include "pipeline/region/compile/cached.h"

#include "shared/kernel_cache/cache.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::region {

std::shared_ptr<kernel_cache::KernelCache> make_memory_cache() {
  return kernel_cache::KernelCache::create({.memory_bytes = 64u << 20});
}

Result<CachedProgram> compile_cached(kernel_cache::KernelCache& cache, const kernel_cache::Key& key,
                                     const std::string& name, const Source& source, const Compiler& compiler,
                                     const std::string& arch, const Validator& usable) {
  bool compiled = false;
  auto entry = cache.get_or_compile(
      key, name, arch,
      [&] {
        compiled = true;
        telemetry::ScopedSpan span("region_compile");
        span.attribute("ditfleet.region", name);
        span.attribute("ditfleet.arch", arch);
        span.attribute("ditfleet.backend", std::string(compiler.name()));
        span.attribute("ditfleet.source_bytes", static_cast<std::int64_t>(source.text.size()));
        auto made = compiler.compile(name, source, arch);
        if (!made) span.failed(made.error().message);
        return made;
      },
      usable);
  if (!entry) return entry.error();
  return CachedProgram{*entry, compiled};
}

}  // namespace ditfleet::region
