// Many strided copies at once: one launch on a GPU if its program is available, else one by one with LibTorch.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace ditfleet::region {

struct RegionHost;

// to = from · scale, rounded once; zeros if `from` is undefined. Matrices [rows, columns] of one element type,
// row-major with any row stride.
struct TensorCopy {
  at::Tensor to, from;
  double scale = 1;
};

// Runs copies one by one with LibTorch, on the calling thread's current stream.
void run_copies(const std::vector<TensorCopy>& copies);

class MatrixCopies {
 public:
  // Prepared copies that can run any number of times; on a GPU their table is in device memory. Keeps their tensors.
  // Immutable.
  class Ready {
   public:
    virtual ~Ready() = default;
  };

  virtual ~MatrixCopies() = default;
  // Copies must not overlap. The table is uploaded on the calling thread's current stream. Throws what LibTorch throws.
  virtual std::shared_ptr<const Ready> prepare(std::vector<TensorCopy> copies) const = 0;
  // Runs on the calling thread's current stream. `ready` must come from this object. Throws what LibTorch throws, and
  // pipeline::Failure. Thread-safe.
  virtual void run(const Ready& ready) const = 0;
};

// With backend nvrtc on a GPU the program comes from the kernel cache. If it is not available, copies run with
// LibTorch, which counts as a fallback.
std::shared_ptr<const MatrixCopies> make_matrix_copies(const RegionHost& host);

}  // namespace ditfleet::region
