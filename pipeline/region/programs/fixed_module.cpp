#include "pipeline/region/programs/fixed_module.h"

#include <chrono>

#include "pipeline/region/run/region.h"

namespace ditfleet::region {

bool compiles_for_gpu(const RegionHost& host) {
  return host.compiler && host.compiler->output_kind() == kernel_cache::Kind::kCubin;
}

Result<std::shared_ptr<const GpuModule>> load_fixed_module(const RegionHost& host, const FixedProgram& program) {
  const auto compile = [&](const Validator& usable) {
    const auto begun = std::chrono::steady_clock::now();
    auto made = compile_fixed(*host.cache, program, *host.compiler, host.arch, usable);
    if (made)
      host.counters->program_took(
          host.compiler->name(), "first", made->compiled,
          std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun));
    return made;
  };
  return load_cached(compile, [&](const Entry& entry) { return GpuModule::load(entry, program.source, host.device); });
}

std::shared_ptr<const GpuModule> fixed_module(const RegionHost& host, const FixedProgram& program) {
  if (!compiles_for_gpu(host)) return nullptr;
  auto module = load_fixed_module(host, program);
  if (module) return std::move(*module);
  host.fall_back(program.name, "compile_error", module.error().message);
  return nullptr;
}

}  // namespace ditfleet::region
