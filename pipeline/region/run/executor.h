// Runs a compiled plan on tensors: GEMM and attention through libraries, row kernels through a launcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

#include "pipeline/region/libraries/attention.h"
#include "pipeline/region/libraries/direct_attention.h"
#include "pipeline/region/libraries/gemm.h"
#include "pipeline/region/libraries/timed_attention.h"
#include "pipeline/region/run/resolved.h"
#include "pipeline/region/run/row_launcher.h"

namespace ditfleet::region {

// Scratch memory of finished calls, kept for the next ones. One pool serves all regions of a model. Thread safe.
class WorkspacePool {
 public:
  at::Tensor take(std::int64_t bytes, c10::Device device);
  void give_back(at::Tensor workspace);

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> idle_;
};

// What a call leaves to libraries, and how.
struct Libraries {
  const Gemm* gemm = nullptr;  // null: LibTorch's
  bool tune = false;           // time its algorithms, and attentions, for a shape that is new
  AttentionBackend attention = AttentionBackend::kAuto;
  const DirectAttention* direct_attention =
      nullptr;  // null: LibTorch's, whose result is copied if it has to lie elsewhere
  const TimedAttention* timed_attention = nullptr;  // null: `attention` in any case
};

// Tells `direct` of the attentions that a call will ask it for.
void expect_attention(const DirectAttention& direct, const Plan& plan, const Resolved& resolved);

// inputs: one for each of Program::inputs(), checked (sizes_of). outputs: one for each of Program::outputs; a defined
// tensor is written to, an undefined one is made. A defined one may be the memory of the input that Plan::may_replace
// names, and of no other. Tables may have an axis of 1 for a longer one; last axes that are not contiguous are copied.
// Thread safe; throws what LibTorch, the matrix library and the launcher throw.
void execute(const Plan& plan, const Resolved& resolved, const RowLauncher& launcher, const Libraries& libraries,
             WorkspacePool& pool, std::vector<at::Tensor> inputs, std::vector<at::Tensor>& outputs);

}  // namespace ditfleet::region
