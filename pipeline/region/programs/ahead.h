// Compiles a model's regions ahead of time. Needs no GPU.
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

// What decides which programs a supported architecture ("sm_90a", "cpu") has.
struct ArchFeatures {
  bool gpu, fp8_products, f8_attention;  // the CPU computes fp8 products and attention in wider types
};
ArchFeatures features_of(const std::string& arch);

// The programs that a model family compiles for one architecture.
struct AheadPrograms {
  std::vector<Program> blocks;
  std::vector<FixedProgram> fixed;  // hand-written; for GPUs only
};

struct AheadRegion {
  std::string name, arch;
  std::string element_type;     // "bf16"
  bool compiled = false;        // by this call; false: the cache had it
  std::int64_t compile_us = 0;  // until it was compiled or found
  kernel_cache::Key key;
  std::shared_ptr<const kernel_cache::Entry> program;
  std::string explanation;  // lines that describe the fused steps and kernels

  std::uint32_t registers() const;    // of the kernel that needs most
  std::uint32_t spill_bytes() const;  // of all kernels
};

struct AheadReport {
  std::vector<AheadRegion> regions;
  std::vector<std::string> eager;  // architectures without programs, because workers run eagerly (runs_eagerly())
  int compiled = 0, hits = 0;
};

// One warning per kernel that spills registers to memory. No kernel should.
std::vector<std::string> spill_warnings(const AheadReport& report);

// Supported are gpu_architectures() and "cpu". kInvalidArgument: the message contains the first unsupported
// architecture.
Result<void> check_architectures(const std::vector<std::string>& architectures);

// Compiles a family's programs for one architecture and stores them in the cache, under the keys that a worker with
// this architecture looks up. Programs with equal keys are compiled once. Without programs the report is empty and no
// compiler is needed. `type`: the blocks' element type. `arch` must be supported. Uses only the paths of the compilers
// from `options`. Blocks for seconds. Errors: kUnavailable (a compiler is missing), kInternal (the compiler rejects a
// source), kDataCorrupt (a program for this host does not load).
Result<AheadReport> compile_ahead(const AheadPrograms& programs, ElementType type, const std::string& arch,
                                  kernel_cache::KernelCache& cache, const CompileOptions& options = {});

}  // namespace ditfleet::region
