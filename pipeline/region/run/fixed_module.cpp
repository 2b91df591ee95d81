#include "pipeline/region/run/fixed_module.h"

#include <chrono>

#include "pipeline/device/failure.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::region {
namespace {

Result<std::shared_ptr<const GpuModule>> load(RegionHost& host, const FixedProgram& program) {
  const auto begun = std::chrono::steady_clock::now();
  auto made = compile_fixed(*host.cache, program, *host.compiler, host.arch);
  if (!made) return made.error();
  host.counters->program_took(host.compiler->name(), made->compiled, std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun));
  return GpuModule::load(*made->entry, program.source, host.device);
}

}  // namespace

std::shared_ptr<const GpuModule> fixed_module(RegionHost& host, const FixedProgram& program) {
  if (!host.compiler || host.compiler->output_kind() != kernel_cache::Kind::kCubin) return nullptr;
  auto module = load(host, program);
  if (module) return std::move(*module);
  const std::string& why = module.error().message;
  if (host.options.fullgraph) pipeline::fail(Code::kInvalidArgument, "compile.fullgraph is set and " + program.name + " would run op by op: " + why, "compile.fullgraph");
  host.counters->fell_back(program.name, "compile_error", why, true);
  return nullptr;
}

}  // namespace ditfleet::region
