// The adapters of the request (or batch) that runs now, where compiled blocks read them: B in the columns beside each
// weight, A in memory of its own. So one product computes [x | x·Aᵀ]·[W | B]ᵀ.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/models/linear.h"
#include "pipeline/region/run/matrix_copies.h"

namespace ditfleet::pipeline {

class AdapterColumns {
 public:
  // What a linear is called with: weight and B [out, rank + in] or [out, in + rank], A [1 or batch, rank, in]. Rank is that of all
  // adapters together, rounded up; 0 for a linear without any.
  struct Operands {
    at::Tensor weight, adapter;
  };
  // What some adapters come to, worked out before their request runs.
  struct Layout {
    std::vector<Operands> operands;  // of each linear
    std::shared_ptr<const region::MatrixCopies::Ready> copies;
  };
  // The terms of one linear in each sample.
  using Samples = std::vector<const std::vector<LowRank>*>;

  // Each linear must have room. Keeps their tensors, and takes as much memory again for A.
  AdapterColumns(std::vector<LinearSlot> linears, std::shared_ptr<const region::MatrixCopies> copies);

  std::size_t size() const { return linears_.size(); }
  // Why the terms of each linear (samples[linear]) do not fit side by side; empty if they do. Thread safe.
  std::string problem(const std::vector<Samples>& samples) const;
  // Where the terms go, which must fit. A term that several samples have in common (the same B) is there once. Whoever
  // holds the layout keeps the terms' tensors. Thread safe.
  Layout plan(const std::vector<Samples>& samples) const;
  // Puts them there, on the current stream. What stood beside them stays, and nobody reads it.
  void load(const Layout& layout) { copies_->run(*layout.copies); }
  // Overwrites all that was ever loaded with zeros, on the current stream.
  void clear();

 private:
  struct Linear {
    LinearSlot slot;
    at::Tensor a;  // [room, in], for a batch of one. Its address stays, as graphs want it.
  };
  Operands place(const Linear& linear, const Samples& samples, std::vector<region::TensorCopy>& copies) const;

  const std::shared_ptr<const region::MatrixCopies> copies_;
  std::vector<Linear> linears_;
};

}  // namespace ditfleet::pipeline
