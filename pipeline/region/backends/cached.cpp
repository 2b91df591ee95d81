#include "pipeline/region/backends/cached.h"

#include "pipeline/region/key.h"
#include "shared/kernel_cache/cache.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::region {

std::shared_ptr<kernel_cache::KernelCache> make_memory_cache() {
  return kernel_cache::KernelCache::create({.memory_bytes = 64u << 20});
}

Result<CachedProgram> compile_cached(kernel_cache::KernelCache& cache, const Plan& plan, const Source& source, const Compiler& compiler, const std::string& arch) {
  const std::string& block = plan.program.block;
  bool compiled = false;
  auto entry = cache.get_or_compile(key_of(identify(plan, source, compiler, arch)), block, arch, [&] {
    compiled = true;
    telemetry::ScopedSpan span("region_compile");
    span.attribute("ditfleet.region", block);
    span.attribute("ditfleet.arch", arch);
    span.attribute("ditfleet.backend", std::string(compiler.name()));
    span.attribute("ditfleet.source_bytes", static_cast<std::int64_t>(source.text.size()));
    auto made = compiler.compile(block, source, arch);
    if (!made) span.failed(made.error().message);
    return made;
  });
  if (!entry) return entry.error();
  return CachedProgram{*entry, compiled};
}

}  // namespace ditfleet::region
