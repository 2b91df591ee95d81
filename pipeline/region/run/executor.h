// Executes a compiled plan on tensors: GEMM and attention with libraries, row kernels with a launcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

#include "pipeline/region/libraries/attention.h"
#include "pipeline/region/libraries/direct_attention.h"
#include "pipeline/region/libraries/fp8.h"
#include "pipeline/region/libraries/gemm.h"
#include "pipeline/region/run/resolved.h"
#include "pipeline/region/run/row_launcher.h"

namespace ditfleet::pipeline::parallel {
class Sequence;
}

namespace ditfleet::region {

// Keeps scratch memory of finished calls for later ones. All regions of a model share one pool. Thread-safe.
class WorkspacePool {
 public:
  at::Tensor take(std::int64_t bytes, c10::Device device);
  void give_back(at::Tensor workspace);

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> idle_;
};

// The libraries of a call.
struct Libraries {
  const Gemm* gemm = nullptr;  // null: LibTorch's
  AttentionBackend attention = AttentionBackend::kAuto;
  const DirectAttention* direct_attention = nullptr;       // null: LibTorch's, whose result may have to be copied
  F8Heads f8_heads = fp8_heads;                            // for direct_attention
  const pipeline::parallel::Sequence* sequence = nullptr;  // how ranks share the tokens; null: one rank
};

// Prewarms `direct` for the attentions of a call.
void prewarm_attention(const DirectAttention& direct, const Plan& plan, const Resolved& resolved);

// inputs: one for each of Program::inputs(), checked by sizes_of(). Axes of length 1 of a table input broadcast. Inputs
// whose last axis is not contiguous are copied.
// outputs: one for each of Program::outputs. Writes to defined tensors and allocates undefined ones. An output
// must not overlap an input, except the one that Plan::may_replace lists for that output. Thread-safe. Throws what
// LibTorch, the matrix library and the launcher throw.
void execute(const Plan& plan, const Resolved& resolved, const RowLauncher& launcher, const Libraries& libraries,
             WorkspacePool& pool, std::vector<at::Tensor> inputs, std::vector<at::Tensor>& outputs);

}  // namespace ditfleet::region
