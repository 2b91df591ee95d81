// The adapters of the request (or batch) that runs now, where compiled blocks read them: B in the columns beside each
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
  // What a linear is called with: weight and B [out, rank + in] or [out, in + rank], A [1 or batch, rank, in]. Rank is
  // that of all adapters together, rounded up; 0 for a linear without any.
  struct Operands {
    at::Tensor weight, adapter;
    std::int64_t used = 0;  // rows of A that hold a term, before rounding up
  };
  // The copies of some linears.
  struct Part {
    std::shared_ptr<const region::MatrixCopies::Ready> terms;
    std::shared_ptr<const region::MatrixCopies::Ready>
        rounding;  // zeros for the rows of A behind the terms'; null for a batch, whose terms have them
  };
  // What some adapters come to, worked out before their request runs.
  struct Layout {
    std::vector<Operands> operands;  // of each linear
    Part first, rest;
  };
  // The terms of one linear in each sample.
  using Samples = std::vector<const std::vector<LowRank>*>;

  // Each linear must have room. Keeps their tensors, and takes as much memory again for A. The first `first` of them
  // are needed before the others.
  AdapterColumns(std::vector<LinearSlot> linears, std::size_t first,
                 std::shared_ptr<const region::MatrixCopies> copies);

  std::size_t size() const { return linears_.size(); }
  // Why the terms of each linear (samples[linear]) do not fit side by side; empty if they do. Thread safe.
  std::string problem(const std::vector<Samples>& samples) const;
  // Where the terms go, which must fit. A term that several samples have in common (the same B) is there once. Whoever
  // holds the layout keeps the terms' tensors. Thread safe.
  Layout plan(const std::vector<Samples>& samples) const;
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
    at::Tensor a;           // [room, in], for a batch of one. Its address stays, as graphs want it.
    std::int64_t used = 0;  // rows of `a` from which on all are zeros
  };
  struct Copies {
    std::vector<region::TensorCopy> terms, rounding;
  };
  Operands place(const Linear& linear, const Samples& samples, Copies& copies) const;

  const std::shared_ptr<const region::MatrixCopies> copies_;
  const std::size_t first_;
  std::vector<Linear> linears_;
  SideStream side_stream_;
};

}  // namespace ditfleet::pipeline
