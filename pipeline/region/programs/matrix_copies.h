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
  // Copies made ready to be started any number of times; on a GPU their table lies there already. Keeps their tensors.
  // Immutable.
  class Ready {
   public:
    virtual ~Ready() = default;
  };

  virtual ~MatrixCopies() = default;
  // None of them may overlap another. The table is on its way in the calling thread's current stream. Throws what
  // LibTorch throws.
  virtual std::shared_ptr<const Ready> prepare(std::vector<TensorCopy> copies) const = 0;
  // On the calling thread's current stream. `ready` is this object's. Throws what LibTorch throws, and
  // pipeline::Failure. Thread safe.
  virtual void run(const Ready& ready) const = 0;
};

// Through the kernel cache on a GPU whose backend is nvrtc. Falls back to LibTorch, counted, where its program cannot
// be had.
std::shared_ptr<const MatrixCopies> make_matrix_copies(RegionHost& host);

}  // namespace ditfleet::region
