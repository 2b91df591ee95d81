// Runs row kernels: host functions on CPU threads, or a cubin's kernels on a stream.
#pragma once

#include <memory>
#include <vector>

#include "pipeline/region/codegen/source.h"
#include "pipeline/region/compile/gpu_module.h"
#include "pipeline/region/compile/host_module.h"
#include "pipeline/region/run/resolved.h"

namespace ditfleet::region {

class RowLauncher {
 public:
  virtual ~RowLauncher() = default;
  // `instances`: for each instance, the kernel's arguments as 64-bit words, with pointers and strides filled in. On a
  // GPU it enqueues the work on the current stream. Throws pipeline::Failure. Thread-safe.
  virtual void launch(const ResolvedRows& step, const std::vector<std::vector<long long>>& instances) const = 0;
};

// Uses LibTorch's threads, so that one setting bounds all parallelism of the process.
std::unique_ptr<RowLauncher> host_launcher(std::shared_ptr<const HostModule> module, std::vector<std::int64_t> widths);

// Chooses the variant of each launch by offsets and alignment, and the grid by the number of rows. Starts on the
// calling thread's current stream.
std::unique_ptr<RowLauncher> gpu_launcher(std::shared_ptr<const GpuModule> module, std::vector<RowKernel> kernels);

}  // namespace ditfleet::region
