// The adapters of the request that runs now, where compiled blocks read them: B in the columns beside each
// weight, A in memory of its own. So one product computes [x | x·Aᵀ]·[W | B]ᵀ.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/device/side_stream.h"
#include "pipeline/nn/linear.h"
#include "pipeline/region/programs/matrix_copies.h"

namespace ditfleet::pipeline {

class AdapterColumns {
 public:
  // What a linear is called with: weight and B [out, rank + in] or [out, in + rank], A [1, rank, in]. Rank is
  // that of all adapters together, rounded up; 0 for a linear without any.
  struct Operands {
    at::Tensor weight, adapter;
    std::int64_t used = 0;  // rows of A that hold a term, before rounding up
  };
  // The copies of some linears.
  struct Part {
    std::shared_ptr<const region::MatrixCopies::Ready> terms;
    std::shared_ptr<const region::MatrixCopies::Ready> rounding;  // zeros for the rows of A behind the terms
  };
  // What some adapters come to, worked out before their request runs.
  struct Layout {
    std::vector<Operands> operands;  // of each linear
    Part first, rest;
  };
  // The terms of each linear.
  using Terms = std::vector<const std::vector<LowRank>*>;

  // Each linear must have room. Keeps their tensors, and takes as much memory again for A. The first `first` of them
  // are needed before the others.
  AdapterColumns(std::vector<LinearSlot> linears, std::size_t first,
                 std::shared_ptr<const region::MatrixCopies> copies);

  std::size_t size() const { return linears_.size(); }
  // Why the terms do not fit side by side; empty if they do. Thread safe.
  std::string problem(const Terms& terms) const;
  // Where the terms go, which must fit. The layout keeps their tensors. Thread safe.
  Layout plan(const Terms& terms) const;
  // Puts them there: the first linears' on the current stream, the others' beside it, for whoever joins. What stood
  // beside them stays, and nobody reads it. Whoever holds the layout holds it until the next load().
  void load(const Layout& layout);
  // What comes on the current stream from here on finds all of them.
  void join() { side_stream_.join(); }
  // Overwrites all that was ever loaded with zeros, on the current stream.
  void clear();

 private:
  struct Linear {
    LinearSlot slot;
    at::Tensor a;           // [room, in]; its address stays, because CUDA graphs keep it
    std::int64_t used = 0;  // rows of `a` from which on all are zeros
  };
  struct Copies {
    std::vector<region::TensorCopy> terms, rounding;
  };
  Operands place(const Linear& linear, const std::vector<LowRank>& terms, Copies& copies) const;

  const std::shared_ptr<const region::MatrixCopies> copies_;
  const std::size_t first_;
  std::vector<Linear> linears_;
  SideStream side_stream_;
};

}  // namespace ditfleet::pipeline
