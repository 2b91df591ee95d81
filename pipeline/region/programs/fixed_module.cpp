#include "pipeline/region/programs/fixed_module.h"

#include "pipeline/region/run/region.h"

namespace ditfleet::region {

std::shared_ptr<const GpuModule> fixed_module(const RegionHost& host, const FixedProgram& program) {
  if (!host.compiler || host.compiler->output_kind() != kernel_cache::Kind::kCubin) return nullptr;
  const auto compile = [&](const Validator& usable) {
    const auto key = key_of(program, *host.compiler, host.arch);
    return host.compile(key, program.name, program.source, "first", usable);
  };
  auto module =
      load_cached(compile, [&](const Entry& entry) { return GpuModule::load(entry, program.source, host.device); });
  if (module) return std::move(*module);
  host.fall_back(program.name, "compile_error", module.error().message);
  return nullptr;
}

}  // namespace ditfleet::region
