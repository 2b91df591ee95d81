// Matrix products of a region on a GPU: which algorithm for which shape, remembered; and their workspace from
// LibTorch's allocator, so that it is the right stream's and part of a graph that is being captured.
#pragma once

#include <memory>
#include <string>

#include "pipeline/region/gpu/cublaslt.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::region {

class Gemm {
 public:
  virtual ~Gemm() = default;
  // On the calling thread's current device and stream. False, and nothing done, where the library has no algorithm for
  // the shape (odd alignments). Throws pipeline::Failure. Thread safe.
  virtual bool run(GemmEpilogue epilogue, ElementType type, std::int64_t rows, std::int64_t in, std::int64_t out, std::int64_t x_stride,
                   std::int64_t weight_stride, std::int64_t out_stride, const GemmOperands& operands) const = 0;
};

struct GemmOptions {
  // Times the library's candidates on the call's own operands when a shape is first seen, and keeps the choice in the
  // kernel cache under the plan key. Off: its first suggestion.
  bool tune = false;
  std::string arch;                                   // for the cache's entries
  std::shared_ptr<kernel_cache::KernelCache> cache;   // null: choices live in this process alone
};

// For GPU `device`, LibTorch's current one. Throws pipeline::Failure where cuBLASLt cannot be had.
std::shared_ptr<const Gemm> make_gemm(int device, GemmOptions options);

}  // namespace ditfleet::region
