// Matrix products of a region on a GPU, by cuBLASLt. Their workspace comes from LibTorch's allocator, so that it
// belongs to the right stream and to a graph that is being captured.
#pragma once

#include <memory>

#include "pipeline/region/libraries/cublaslt.h"

namespace ditfleet::region {

class Gemm {
 public:
  virtual ~Gemm() = default;
  // Runs the library's first suggestion for these arguments, on the calling thread's current device and stream. Returns
  // false, and does nothing, if the library has no algorithm for them (odd alignments). Throws pipeline::Failure.
  // Thread-safe.
  virtual bool run(GemmEpilogue epilogue, ElementType type, std::int64_t rows, std::int64_t in, std::int64_t out,
                   std::int64_t x_stride, std::int64_t weight_stride, std::int64_t out_stride,
                   const GemmOperands& operands) const = 0;
};

// `device` must be LibTorch's current GPU. Throws pipeline::Failure if cuBLASLt is not available.
std::shared_ptr<const Gemm> make_gemm(int device);

}  // namespace ditfleet::region
