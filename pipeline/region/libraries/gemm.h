// Matrix products of a region on a GPU: which algorithm for which shape, remembered; and their workspace from
// LibTorch's allocator, so that it is the right stream's and part of a graph that is being captured.
#pragma once

#include <memory>
#include <string>

#include "pipeline/region/libraries/cublaslt.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::region {

class Gemm {
 public:
  virtual ~Gemm() = default;
  // With `tune` the library's candidates are timed on the operands when the shape is first seen, and the choice is kept
  // in the kernel cache under the plan key; else its first suggestion runs. On the calling thread's current device and
  // stream. False, and nothing done, where the library has no algorithm for the shape (odd alignments). Throws
  // pipeline::Failure. Thread safe.
  virtual bool run(bool tune, GemmEpilogue epilogue, ElementType type, std::int64_t rows, std::int64_t in,
                   std::int64_t out, std::int64_t x_stride, std::int64_t weight_stride, std::int64_t out_stride,
                   const GemmOperands& operands) const = 0;
};

// For GPU `device`, LibTorch's current one. arch: of the cache's entries. Throws pipeline::Failure where cuBLASLt
// cannot be had.
std::shared_ptr<const Gemm> make_gemm(int device, std::string arch, std::shared_ptr<kernel_cache::KernelCache> cache);

}  // namespace ditfleet::region
