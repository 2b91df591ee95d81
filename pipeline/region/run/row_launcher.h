// Runs row kernels on a device: host functions on the CPU's threads, or a cubin's on a stream.
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
  // `instances`: the resolved step's words with pointers and strides filled in. Returns when the host's part is
  // done; on a GPU the work is in the current stream's order. Throws pipeline::Failure. Thread safe.
  virtual void launch(const ResolvedRows& step, const std::vector<std::vector<long long>>& instances) const = 0;
};

// Rows are shared out by LibTorch's own threads, so that one setting bounds all of the process's parallelism.
std::unique_ptr<RowLauncher> host_launcher(std::shared_ptr<const HostModule> module, std::vector<std::int64_t> widths);

// Chooses each launch's variant by its offsets and alignment, and its grid by its rows; starts on the calling thread's
// current stream.
std::unique_ptr<RowLauncher> gpu_launcher(std::shared_ptr<const GpuModule> module, std::vector<RowKernel> kernels);

}  // namespace ditfleet::region
