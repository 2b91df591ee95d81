// Matrix products of a region on a GPU, by cuBLASLt. Their workspace comes from LibTorch's allocator, so that it
// belongs to the right stream and to a graph that is being captured.
#pragma once

#include <c10/core/Device.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "pipeline/region/libraries/cublaslt.h"

namespace ditfleet::region {

class Gemm {
 public:
  // `device` must be LibTorch's current GPU. Throws pipeline::Failure if cuBLASLt is not available.
  explicit Gemm(int device);
  // Runs the library's first suggestion for these arguments, on the calling thread's current device and stream. Sets
  // the shape's alignment itself. Returns false, and does nothing, if the library has no algorithm for them (odd
  // alignments, an old GPU). Throws pipeline::Failure. Thread-safe.
  bool run(GemmShape shape, const GemmOperands& operands) const;

 private:
  std::optional<GemmAlgorithm> algorithm_for(const GemmShape& shape, const GemmOperands& operands) const;

  const c10::Device device_;
  const std::shared_ptr<const CublasLt> library_;
  mutable std::mutex mutex_;
  mutable std::map<GemmShape, std::optional<GemmAlgorithm>> algorithms_;
};

}  // namespace ditfleet::region
