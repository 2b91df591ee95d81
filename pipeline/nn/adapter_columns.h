// Copies the adapters of the current request to where compiled blocks read them: B into the columns next to each
// weight, A into a separate buffer. One product then computes [x | x·Aᵀ]·[W | B]ᵀ.
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
  // The operands of a linear: weight and B [out, rank + in] or [out, in + rank], or B alone [out, rank] if the weight
  // is quantized, and A [1, rank, in]. `rank` is the combined rank of all adapters, rounded up; 0 for a linear without
  // adapters.
  struct Operands {
    at::Tensor weight, adapter;
    std::int64_t used = 0;  // rows of A with terms: the combined rank before rounding up
  };
  // The copies of some linears.
  struct Part {
    std::shared_ptr<const region::MatrixCopies::Ready> terms, rounding;
  };
  struct Copies {
    std::vector<region::TensorCopy> terms;     // A, and B beside a quantized weight
    std::vector<region::TensorCopy> beside;    // B beside a weight
    std::vector<region::TensorCopy> rounding;  // zeros for the rows of A after the terms
  };
  // The operands and copies for one request's adapters, prepared before the request runs. Linears are in the order of
  // the blocks.
  struct Layout {
    std::vector<Operands> operands;  // of each linear
    Part first, rest;                // valid as long as no weight has moved since
    std::int64_t moves = 0;          // PartSequence::moves() then
    std::vector<Copies> copies;      // of each linear, for when weights have moved
  };
  // The terms of each linear.
  using Terms = std::vector<const std::vector<LowRank>*>;

  // `blocks`: the linears of each block, in the order in which blocks run. Every linear must have columns. Keeps the
  // tensors and allocates the buffers for A. `weights`: a part with each block's weights, if they can leave the device;
  // else null.
  AdapterColumns(std::vector<std::vector<LinearSlot>> blocks, std::shared_ptr<const region::MatrixCopies> copies,
                 std::shared_ptr<PartSequence> weights = nullptr);
  AdapterColumns(const AdapterColumns&) = delete;
  AdapterColumns& operator=(const AdapterColumns&) = delete;

  // Why the terms do not fit into the columns; empty if they fit. `columns` may be null. Thread-safe.
  static std::string problem(const AdapterColumns* columns, const Terms& terms);
  // Precondition: the terms fit. The layout keeps their tensors. Thread-safe.
  std::shared_ptr<const Layout> plan(const Terms& terms) const;
  // Copies the terms, unless they are there already: the first block's on the current stream, the others on a side
  // stream; call join() before you use them. No block that reads columns may run meanwhile. Fills the columns of
  // weights that are off the device when they arrive.
  void load(std::shared_ptr<const Layout> layout);
  // Makes the current stream wait for all copies of load().
  void join() { side_stream_.join(); }
  // Overwrites all columns and buffers with zeros. No block that reads columns may run meanwhile.
  void clear();

 private:
  struct Linear {
    LinearSlot slot;
    at::Tensor a;           // [room, in]; its address stays, because CUDA graphs keep it
    std::int64_t used = 0;  // rows of `a` that may be nonzero; all later rows are zeros
  };
  Operands place(const Linear& linear, const std::vector<LowRank>& terms, Copies& copies) const;
  void copy(const Layout& layout);
  // Copies B to a block whose weights have come to the device, on the current stream. Sets all other columns of the
  // block to zeros. `layout` null: no B.
  void write(const Layout* layout, std::size_t block) const;

  const std::shared_ptr<const region::MatrixCopies> copies_;
  const std::shared_ptr<PartSequence> weights_;
  std::vector<Linear> linears_;
  std::vector<std::size_t> ends_;  // of each block in linears_
  std::shared_ptr<const Layout> loaded_;
  SideStream side_stream_;
};

}  // namespace ditfleet::pipeline
