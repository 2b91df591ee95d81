// Compiling a model's regions before any worker asks for them, on a machine without a GPU.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/region/options.h"
#include "shared/core/result.h"
#include "shared/kernel_cache/entry.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::region {

struct BlockShape;

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
  std::vector<std::string>
      op_by_op;  // architectures for which nothing was compiled, since workers ask for nothing there (runs_op_by_op())
  int compiled = 0, hits = 0;
};

// A line for each kernel that keeps some of its registers in memory, which none is meant to.
std::vector<std::string> spill_warnings(const AheadReport& report);

// The architectures that can be asked for: gpu_architectures(), and cpu.
std::vector<std::string> ahead_architectures();
// kInvalidArgument names the first that is not one of them.
Result<void> check_architectures(const std::vector<std::string>& architectures);

// FLUX's blocks (double, single: which of them the model has), without and with adapters (one program where the kernels
// are the same), and a GPU's fixed programs, for one architecture, through the cache, under the keys that a worker
// there asks for. kInvalidArgument: check_architectures(); kUnavailable names the compiler that is missing; kInternal a
// source that was refused; kDataCorrupt a program for the host that does not load. Of the options it takes the
// compilers' files and which components are compiled; where that leaves nothing, the report is empty and no compiler is
// needed. Blocks for a few seconds.
Result<AheadReport> compile_ahead(const BlockShape& shape, bool with_double, bool with_single, const std::string& arch,
                                  kernel_cache::KernelCache& cache, const CompileOptions& options = {});

}  // namespace ditfleet::region
