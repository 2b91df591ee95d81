// Many strided copies at once: one launch on a GPU that has the program for it, else one by one with LibTorch.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace ditfleet::region {

struct RegionHost;

// to = from · scale, rounded once; zeros where `from` is undefined. Matrices [rows, columns] of one element type, rows
// of adjacent elements.
struct TensorCopy {
  at::Tensor to, from;
  double scale = 1;
};

class MatrixCopies {
 public:
  virtual ~MatrixCopies() = default;
  // In their order, or in any where none overlap: give those that overwrite others' zeros in a later call. On the calling
  // thread's current stream. Throws what LibTorch throws, and pipeline::Failure. Thread safe.
  virtual void run(const std::vector<TensorCopy>& copies) const = 0;
};

// Through the kernel cache on a GPU whose backend is nvrtc. Falls back to LibTorch, counted, where its program cannot be had.
std::shared_ptr<const MatrixCopies> make_matrix_copies(RegionHost& host);

}  // namespace ditfleet::region
