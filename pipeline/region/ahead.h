// Compiling a model's regions before any worker asks for them, on a machine without a GPU.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/region/ir/program.h"
#include "pipeline/region/options.h"
#include "pipeline/region/programs/fixed_program.h"
#include "shared/core/result.h"
#include "shared/kernel_cache/entry.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::region {

// What a model family compiles for one architecture.
struct AheadPrograms {
  std::vector<Program> blocks;
  std::vector<FixedProgram> fixed;  // hand-written; for GPUs only
};

struct AheadRegion {
  std::string name, arch;
  std::string element_type;     // "bf16"
  bool compiled = false;        // here and now; else the cache had it
  std::int64_t compile_us = 0;  // to have it, compiled or found
  kernel_cache::Key key;
  std::shared_ptr<const kernel_cache::Entry> program;
  std::string explanation;  // the fused steps and kernels, in lines

  std::uint32_t registers() const;    // of the kernel that needs most
  std::uint32_t spill_bytes() const;  // of all kernels
};

struct AheadReport {
  std::vector<AheadRegion> regions;
  std::vector<std::string> eager;  // architectures on which workers run eagerly (runs_eagerly()): nothing was compiled
  int compiled = 0, hits = 0;
};

// A line for each kernel that keeps some of its registers in memory, which none is meant to.
std::vector<std::string> spill_warnings(const AheadReport& report);

// The architectures that can be asked for: gpu_architectures(), and cpu.
std::vector<std::string> ahead_architectures();
// kInvalidArgument names the first that is not one of them.
Result<void> check_architectures(const std::vector<std::string>& architectures);

// Compiles a family's programs for one architecture through the cache, under the keys that a worker there looks up.
// Programs with equal keys are compiled once; without programs the report is empty and no compiler is needed. `type`:
// the blocks' element type. Of the options it uses the compilers' files. Blocks for a few seconds.
// Errors: those of check_architectures(); kUnavailable names the compiler that is missing; kInternal: the compiler
// refused a source; kDataCorrupt: a program for this host does not load.
Result<AheadReport> compile_ahead(const AheadPrograms& programs, ElementType type, const std::string& arch,
                                  kernel_cache::KernelCache& cache, const CompileOptions& options = {});

}  // namespace ditfleet::region
