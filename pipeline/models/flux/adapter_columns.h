// The adapters of the request (or batch) that runs now, where compiled blocks read them: B in the columns beside each
// weight, A in memory of its own. So one product computes [x | x·Aᵀ]·[W | B]ᵀ.
#pragma once

#include <memory>
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
  // The terms of one linear in each sample.
  using Samples = std::vector<const std::vector<LowRank>*>;

  // Each linear must have room. Keeps their tensors.
  AdapterColumns(std::vector<LinearSlot> linears, std::shared_ptr<const region::MatrixCopies> copies);

  std::size_t size() const { return linears_.size(); }
  const Operands& operands(std::size_t linear) const { return linears_[linear].operands; }
  bool any(std::size_t linear) const { return linears_[linear].operands.adapter.size(1) > 0; }

  // Whether the terms fit beside the linear.
  bool fits(std::size_t linear, const Samples& samples) const;
  // Puts the terms of each linear (samples[linear]) in place, on the current stream; what stood there before is overwritten. A term that several samples
  // have in common (the same B) is there once. Throws Failure (kInvalidArgument, param "loras") where they do not fit.
  void load(const std::vector<Samples>& samples);

 private:
  struct Linear {
    LinearSlot slot;
    at::Tensor room_of_a;       // [room, in], for a batch of one; undefined until first used. Its address stays, as graphs want it.
    std::int64_t columns = 0;   // that hold something
    Operands operands;
  };
  // Of one linear: which columns belong to which term.
  struct Column {
    const LowRank* term;
    std::int64_t first;
    std::vector<const LowRank*> of_sample;  // the same adapter's term there, null where the sample does without
  };
  static std::vector<Column> columns_of(const Samples& samples, std::int64_t& total);
  using Copies = std::vector<region::TensorCopy>;
  void place(Linear& linear, const Samples& samples, Copies& zeros, Copies& copies);

  const std::shared_ptr<const region::MatrixCopies> copies_;
  std::vector<Linear> linears_;
};

}  // namespace ditfleet::pipeline
