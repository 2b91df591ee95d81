// An adapter in host memory, packed so that a single copy moves it to a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/lora/names.h"

namespace ditfleet::pipeline {

// Files may have modules up to this rank, or up to worker.lora.max_rank if that is higher.
inline constexpr std::int64_t kMostAdapterRank = 256;

struct PackedAdapter {
  // One A and the rows of B that change one matrix.
  struct Term {
    std::size_t component, slot;  // indices in LoraBase
    std::int64_t down_at, up_at;  // offsets of A [rank, in] and B [rows, rank] in `values`, row-major
    std::int64_t rank, in, rows, first_row;
    double scale;
  };
  at::Tensor values;  // 1-D, in the pipeline's element type, finite; pinned if the device is a GPU
  // The difference of a bias: rows of one matrix.
  struct Bias {
    std::size_t component, slot;
    std::int64_t at, rows, first_row;  // at: offset in `values`
    double scale;
  };
  std::vector<Term> terms;
  std::vector<Bias> biases;
  std::string unused;         // lists tensors that are left out; empty: none
  bool changes_text = false;  // has terms for a text encoder

  std::int64_t rank() const;  // the highest of the terms
  std::int64_t bytes() const { return static_cast<std::int64_t>(values.nbytes()); }
};

// Matrices start at multiples of this number of elements, for aligned vector loads on a GPU.
inline constexpr std::int64_t kPackedAlignment = 16;

// Reads and checks a file. Throws Failure: the errors of read_lora_file(), and kInvalidArgument for weights that
// overflow the model's element type. Throws LibTorch's exceptions when memory runs out.
std::shared_ptr<const PackedAdapter> read_packed_adapter(const std::string& path, const LoraNames& names,
                                                         std::int64_t max_rank, Placement placement);

// The most elements that an adapter of this base can have with ranks up to max_rank.
std::int64_t most_packed_elements(const LoraBase& base, std::int64_t max_rank);

}  // namespace ditfleet::pipeline
