#include "pipeline/region/programs/ahead.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <numeric>

#include "pipeline/region/compile/cached.h"
#include "pipeline/region/compile/cpu_jit.h"
#include "pipeline/region/compile/host_module.h"
#include "pipeline/region/compile/nvrtc.h"
#include "pipeline/region/key.h"
#include "shared/core/background_threads.h"
#include "shared/kernel_cache/cache.h"

namespace ditfleet::region {
namespace {

// Sizes at which --explain gives numbers: 1024² with 512 text tokens.
const Sizes kExample{{"batch", 1}, {"image", 4096}, {"text", 512}, {"tokens", 4608}};

// What one launch reads and writes.
Dim bytes_moved(const Plan& plan, const RowStep& step) {
  Dim bytes;
  for (const auto& instance : step.instances)
    for (const auto& operand : instance.operands)
      bytes = bytes + elements_of(operand.view.shape) * Dim(bytes_of(plan.buffer(operand.view.buffer).type));
  return bytes;
}

std::string explain_kernels(const Entry& entry) {
  std::string out = "kernels\n";
  for (const auto& kernel : entry.kernels)
    out += "  " + kernel.name + ": " + std::to_string(kernel.registers) + " registers, " +
           std::to_string(kernel.spill_bytes) + " bytes spilled, " + std::to_string(kernel.shared_bytes) +
           " bytes shared\n";
  return out;
}

std::string explain(const Plan& plan, const Entry& entry) {
  std::string out = "steps\n" + print(plan) + "launches (bytes at batch 1, 4096 image and 512 text tokens)\n";
  Sizes sizes = kExample;
  for (const auto& symbol : plan.program.symbols()) sizes.try_emplace(symbol, 16);  // an adapter's rank
  for (const Step& step : plan.steps) {
    const auto* rows = std::get_if<RowStep>(&step);
    if (!rows) continue;
    const Dim bytes = bytes_moved(plan, *rows);
    out += "  " + plan.kernels[static_cast<std::size_t>(rows->kernel)].name + " for " +
           std::to_string(rows->instances.size()) + ": moves " + std::to_string(bytes.evaluate(sizes)) +
           " bytes = " + bytes.text() + "\n";
  }
  return out + explain_kernels(entry);
}

}  // namespace

std::uint32_t AheadRegion::registers() const {
  std::uint32_t most = 0;
  for (const auto& kernel : program->kernels) most = std::max(most, kernel.registers);
  return most;
}

std::uint32_t AheadRegion::spill_bytes() const {
  std::uint32_t sum = 0;
  for (const auto& kernel : program->kernels) sum += kernel.spill_bytes;
  return sum;
}

std::vector<std::string> spill_warnings(const AheadReport& report) {
  std::vector<std::string> lines;
  for (const AheadRegion& region : report.regions)
    for (const auto& kernel : region.program->kernels)
      if (kernel.spill_bytes > 0)
        lines.push_back("kernel " + kernel.name + " of region " + region.name + " for " + region.arch + " spills " +
                        std::to_string(kernel.spill_bytes) +
                        " bytes of its registers to memory: it computes the same, but slower");
  return lines;
}

Result<void> check_architectures(const std::vector<std::string>& architectures) {
  auto known = gpu_architectures();
  known.push_back(kHostArch);
  std::string list;
  for (const auto& one : known) list += (list.empty() ? "" : ", ") + one;
  for (const auto& arch : architectures)
    if (std::find(known.begin(), known.end(), arch) == known.end())
      return invalid_argument("'" + arch + "' is not an architecture for regions; it must be one of " + list, "arch");
  return {};
}

ArchFeatures features_of(const std::string& arch) {
  const bool host = arch == kHostArch;
  return {!host, arch != "sm_80" && arch != "sm_86", host || arch == "sm_90a"};
}

Result<AheadReport> compile_ahead(const AheadPrograms& programs, ElementType type, const std::string& arch,
                                  kernel_cache::KernelCache& cache, const CompileOptions& options) {
  if (programs.blocks.empty() && programs.fixed.empty()) return AheadReport();
  const bool host = arch == kHostArch;
  auto compiler = host ? open_cpu_jit(options.cxx) : open_nvrtc(options.nvrtc);
  if (!compiler) return compiler.error();

  struct Block {
    Plan plan;
    Source source;
    kernel_cache::Key key;
  };
  std::vector<Block> blocks;
  for (const Program& program : programs.blocks) {
    auto plan = fuse(program, (*compiler)->fuse_options());
    if (!plan) return plan.error();
    Source source = host ? generate_cpp(*plan) : generate_cuda(*plan);
    const auto key = key_of(identify(source, **compiler, arch));
    if (std::any_of(blocks.begin(), blocks.end(), [&](const Block& other) { return other.key == key; })) continue;
    blocks.push_back({std::move(plan).value(), std::move(source), key});
  }

  using Clock = std::chrono::steady_clock;
  const auto region_of = [&](const std::string& name, Clock::time_point start, const CachedProgram& made,
                             const kernel_cache::Key& key, std::string explained) {
    const auto spent = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start);
    return AheadRegion{name, arch,       std::string(name_of(type)), made.compiled, spent.count(),
                       key,  made.entry, std::move(explained)};
  };
  // What does not load here loads on no worker like this one: it must not go to them as compiled. A cubin nobody here
  // can ask about.
  Validator loads;
  if (host)
    loads = [](const Entry& entry) -> Result<void> {
      auto module = HostModule::load(entry);
      return module ? Result<void>() : module.error();
    };
  BackgroundThreads threads("compile_ahead", blocks.size() + programs.fixed.size());  // all at once
  std::vector<std::future<Result<AheadRegion>>> running;
  for (const Block& block : blocks)
    running.push_back(threads.run([&]() -> Result<AheadRegion> {
      const auto start = Clock::now();
      auto made = compile_cached(cache, block.key, block.plan.program.block, block.source, **compiler, arch, loads);
      if (!made) return made.error();
      return region_of(block.plan.program.block, start, *made, block.key, explain(block.plan, *made->entry));
    }));
  for (const FixedProgram& program : programs.fixed)
    running.push_back(threads.run([&]() -> Result<AheadRegion> {
      const auto start = Clock::now();
      const auto key = key_of(program, **compiler, arch);
      auto made = compile_cached(cache, key, program.name, program.source, **compiler, arch);
      if (!made) return made.error();
      return region_of(program.name, start, *made, key, explain_kernels(*made->entry));
    }));
  AheadReport report;
  for (auto& one : running) {
    auto region = one.get();  // in the order of the plans; after a failure `threads` finishes the others first
    if (!region) return region.error();
    ++(region->compiled ? report.compiled : report.hits);
    report.regions.push_back(std::move(*region));
  }
  return report;
}

}  // namespace ditfleet::region
